# SPDX-License-Identifier: Apache-2.0
"""What every test relies on: the process's settings, and which tests this machine can run.

A test marked `data("folder")` reads a dataset, one marked `gpu` a GPU, and one marked `prometheus`, `chromium`, `zsh`
or `fish` runs that program of Debian's, one marked `ray` or `nixl` runs that package, one marked `gpu_compiler` Triton,
one marked `namespaces` has two nodes on this machine, which takes root's rights, one marked `native` the library of
kernels for CPUs, which takes a C++ compiler, and one marked `amx` its kernels for processors with AMX. Where that is
missing they are deselected, not skipped, and the summary says how many ran: an absent check must not look like a passed
one.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.commands import forgotten
from tests.debian import CHROMIUM, FISH, PROMETHEUS, ZSH

hypothesis.settings.register_profile("jgr", deadline=None)  # the first example of a test may compile
hypothesis.settings.load_profile("jgr")
# Before jax is imported, here, in pytest-xdist's workers or in a test's subprocess.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A test's time is XLA's compiling, and values hang neither on optimization, nor on which of XLA's two ways to emit a
# fused loop is taken (the older one compiles in two thirds of the time), nor on how many parts of a program are
# compiled at once, which costs processor time where every core has work. JGR_AS_SERVED=1 leaves all that as it is.
if os.environ.get("JGR_AS_SERVED") != "1":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    _FLAGS, _OLDER = os.environ.get("XLA_FLAGS", ""), "xla_cpu_disable_new_fusion_emitters"
    if _OLDER not in _FLAGS:
        _FLAGS += f" --xla_backend_extra_options={_OLDER} --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = _FLAGS.strip()
    # Nor do they hang on where in Python an operation was written, which jax notes for each with all frames of pytest.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# What one test has compiled, such as the engine of a small model, another or a subprocess reads from a folder that
# lasts as long as the run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="jgr-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.01"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# As jgr's commands do (jgr.cli.console): tracing makes very many objects that stay.
gc.set_threshold(50_000, 10, 10)
# Two of jax's strict settings stay off: dtype promotion, because optax raises floats to int32 step counts;
# rank promotion, because masks are written as `arange(t) < lengths[:, None]` throughout.

_DATA = Path(os.environ.get("JGR_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
_RAY = getattr(find_spec("ray"), "origin", "")
_NATIVE = (
    Path(__file__).resolve().parents[1] / "build" / f"native-{Path(sys.prefix).name}"
)  # as tests/native.py
_GPU_COMPILER = Path(__file__).resolve().parents[1] / "build" / f"gpu-compile-{Path(sys.prefix).name}"
_CAP_SYS_ADMIN = 1 << 21


def _may_make_namespaces() -> bool:
    """Whether this process may make network namespaces: as Linux's list of its capabilities has it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return any(int(line.split()[1], 16) & _CAP_SYS_ADMIN for line in lines if line.startswith("CapEff:"))


def _has_amx() -> bool:
    """Whether the processor has what the library's kernels for bfloat16 take, as Linux names it."""
    about = Path("/proc/cpuinfo")
    words = about.read_text().split() if about.exists() else []
    return {"amx_tile", "amx_bf16", "avx512_bf16"} <= set(words)


_PROGRAMS = {
    "prometheus": PROMETHEUS,
    "chromium": CHROMIUM,
    "zsh": ZSH,
    "fish": FISH,
    "ray": _RAY,
    "nixl": getattr(find_spec("nixl_cu12"), "origin", ""),
    "gpu_compiler": str(_GPU_COMPILER) if (_GPU_COMPILER / "triton").is_dir() else "",
    "namespaces": (shutil.which("ip") or "") if _may_make_namespaces() else "",
    "native": str(_NATIVE) if (_NATIVE / "jgr_native").is_dir() else "",
    "amx": str(_NATIVE) if (_NATIVE / "jgr_native").is_dir() and _has_amx() else "",
}
"""What tests are marked with, Debian's programs by the packages' names: where they are, "" where they are not."""
_GET = {
    "namespaces": "root's rights, and apt-get install iproute2",
    "ray": "pip install 'jgr[cluster]'",
    "nixl": "pip install --no-deps nixl-cu12",
    "gpu_compiler": "make installed",
    "native": "make installed, with a C++ compiler",
    "amx": "make installed, with a C++ compiler, on a processor with AMX",
}
_LONGEST = ("test_docs.py", "test_journeys.py")
_LONG = ("training", "models", "serving", "evaluation", "ops", "cli", "benchmarks")
_NEEDS = ("data", "gpu", *_PROGRAMS)
_FILES_OF_PROGRAMS = 15
_ended = itertools.count(1)  # files whose tests this process has run
_SELECTED = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """jgr's wheel."""
    from tests.installed import build_wheel

    return build_wheel(tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def native_library() -> Iterator[None]:
    """The library of kernels for CPUs is found, and "auto" takes it, for the tests of a module."""
    from tests.native import installed

    with installed():
        yield


@pytest.fixture(autouse=True)
def as_without_commands() -> Iterator[None]:
    """The next test finds nothing of a command that is run in this process."""
    with forgotten():
        yield


@pytest.fixture(scope="session")
def kept_programs() -> dict[str, Any]:
    """Where this run keeps its programs, and which: jax's settings before the first engine."""
    import jax

    least = "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"
    return {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *least)}


@pytest.fixture(autouse=True)
def as_without_engines(kept_programs: dict[str, Any]) -> Iterator[None]:
    """An engine turns the process to the folder of its own programs, which may be that of the user's home, and full of
    what earlier runs have compiled; the next test finds the folder of this run again."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    yield
    if kept_programs != {name: getattr(jax.config, name) for name in kept_programs}:
        for name, value in kept_programs.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # or the folder that is in use would stay so


@pytest.fixture(scope="module", autouse=True)
def as_without_programs() -> Iterator[None]:
    """What files of tests have compiled goes after some of them. jax keeps an MLIR context of each program, and to make
    one takes the longer the more there are: three times as long after a thousand. What they share is traced anew."""
    import jax

    yield
    if next(_ended) % _FILES_OF_PROGRAMS == 0:
        jax.clear_caches()


@pytest.fixture
def dataset(request: pytest.FixtureRequest) -> Path:
    """The folder that the test's `data` marker names."""
    return _DATA / str(request.node.get_closest_marker("data").args[0])


def _place(item: pytest.Item) -> int:
    """Files with long tests come first, or one of two processes ends long after the other."""
    name, folder = item.path.name, item.path.parent.name
    if name in _LONGEST:
        return _LONGEST.index(name) - len(_LONGEST)
    return _LONG.index(folder) if folder in _LONG else len(_LONG)


def _marks(item: pytest.Item) -> set[str]:
    """The names of an item's marks, read once: asking for one of them reads them all."""
    return {mark.name for mark in item.iter_markers()}


def _can_run(item: pytest.Item) -> bool:
    marks = _marks(item)
    if "data" in marks and not (_DATA / item.get_closest_marker("data").args[0]).is_dir():
        return False
    if any(name in marks and not path for name, path in _PROGRAMS.items()):
        return False
    return "gpu" not in marks or os.environ["JAX_PLATFORMS"] != "cpu"


@pytest.hookimpl(trylast=True)  # after -m and -k: what they leave out is not counted as missing
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_SELECTED] = Counter(need for item in items for need in _marks(item).intersection(_NEEDS))
    missing = [item for item in items if not _can_run(item)]
    config.hook.pytest_deselected(items=missing)
    left = set(missing)
    items[:] = sorted((item for item in items if item not in left), key=_place)


def pytest_runtest_call(item: pytest.Item) -> None:
    item.user_properties.extend(("needs", need) for need in sorted(_marks(item).intersection(_NEEDS)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of pytest-xdist's: its memory ends with it
        session.config.workeroutput["selected"] = dict(session.config.stash.get(_SELECTED, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker selects from all tests; each test is reported here by the worker that ran it."""
    node.config.stash[_SELECTED] = Counter(getattr(node, "workeroutput", {}).get("selected", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    selected = config.stash.get(_SELECTED, Counter())
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    ran = Counter(
        value for r in reports if r.when == "call" for key, value in r.user_properties if key == "needs"
    )
    found = "found" if _DATA.is_dir() else "not found; set JGR_DATA"
    terminalreporter.write_line(f"data tests: {ran['data']} of {selected['data']} ran (data: {found})")
    if selected["gpu"]:
        platforms = os.environ["JAX_PLATFORMS"]
        terminalreporter.write_line(f"gpu tests: {ran['gpu']} of {selected['gpu']} ran (on: {platforms})")
    for name, path in _PROGRAMS.items():
        if selected[name]:
            found = path or f"not found; {_GET.get(name, f'apt-get install {name}')}"
            terminalreporter.write_line(
                f"{name} tests: {ran[name]} of {selected[name]} ran ({name}: {found})"
            )
