# SPDX-License-Identifier: Apache-2.0
"""The floors of docs/architecture.md: a file imports only from its own floor or one below it, and never in a
circle. Read from the syntax trees, so that an import inside a function counts too; what the policies load is
also checked by loading them.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    (
        "jgr.fields",
        "jgr.config",
        "jgr.files",
        "jgr.extras",
        "jgr.heap",
        "jgr.boot",
        "jgr.control_groups",
        "jgr.cores",
        "jgr.logs",
        "jgr.stopping",
        "jgr.bounded_redis",
        "jgr.catalog",
        "jgr.prompt",
        "jgr.data",
    ),
    ("jgr.ops",),
    ("jgr.models", "jgr.training"),
    ("jgr.cache", "jgr.placement", "jgr.features", "jgr.embeddings", "jgr.library"),
    ("jgr.serving.policies",),
    ("jgr.serving", "jgr.client", "jgr.simulation", "jgr.evaluation", "jgr.traffic", "jgr.ablation"),
    ("jgr.cli", "tools"),
)
SIDE_BY_SIDE = (("jgr.serving.decoders", "jgr.serving.scorers"),)
POLICIES = FLOORS.index(("jgr.serving.policies",))
PURE_FORBIDDEN = {"jax", "jaxlib", "asyncio", "threading", "time", "random", "socket", "concurrent"}
TRAINED = "jgr.simulation.controller"
"""Where controllers are trained: pools by epochs, under jax."""
NEVER = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jax._src"}
MAX_LINES = 500


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


FILES = {_name(path): path for path in _sources("jgr", "tools")}


@cache
def _tree(name: str) -> ast.Module:
    """Parsed when it is asked for: every process that collects the tests imports this file, and one runs it."""
    return ast.parse(FILES[name].read_text(), str(FILES[name]))


def _within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


PURE = [
    name
    for name in FILES
    if name.startswith(("jgr.serving.policies.", "jgr.simulation.")) and not _within(name, TRAINED)
]


def _folder(name: str) -> str:
    """The package that a module stands in; a package's own __init__ stands in itself."""
    return ".".join(FILES[name].relative_to(ROOT).parent.parts)


@cache
def _floor(name: str) -> int | None:
    """The floor of a module by the longest matching place; None for the package `jgr` itself."""
    places = {place: floor for floor, row in enumerate(FLOORS) for place in row if _within(name, place)}
    return places[max(places, key=len)] if places else None


@cache
def _imports(name: str) -> tuple[str, ...]:
    """What `name` imports, wherever in the file: our modules by name, other packages' members too."""
    return tuple(_each_import(name))


def _each_import(name: str) -> Iterator[str]:
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{FILES[name]}:{node.lineno}: import by the full name"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield str(node.module) if node.module in FILES and member not in FILES else member


def _own(name: str) -> set[str]:
    return {i for i in _imports(name) if i in FILES and i != name}


def _uses(name: str, modules: set[str]) -> set[str]:
    return {i for i in _imports(name) for m in modules if _within(i, m)}


def test_every_module_is_on_a_floor() -> None:
    assert [name for name in FILES if _floor(name) is None] == ["jgr"]


def test_imports_point_down() -> None:
    upward = [
        f"{name} (floor {_floor(name)}) imports {other} (floor {_floor(other)})"
        for name in FILES
        for other in _own(name)
        if (_floor(name) or 0) < (_floor(other) or 0)
    ]
    assert upward == []


def test_no_import_cycles() -> None:
    graphlib.TopologicalSorter({name: _own(name) for name in FILES}).prepare()  # raises CycleError naming it


def test_no_folder_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for name in FILES:
        folder = _folder(name)
        graph.setdefault(folder, set()).update({_folder(other) for other in _own(name)} - {folder})
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("one", "other"), [*SIDE_BY_SIDE, *(pair[::-1] for pair in SIDE_BY_SIDE)])
def test_rooms_side_by_side_import_nothing_of_each_other(one: str, other: str) -> None:
    found = {name: used for name in FILES if _within(name, one) and (used := _uses(name, {other}))}
    assert found == {}


def test_plain_data_and_policies_do_not_use_jax() -> None:
    names = [name for name in FILES if _floor(name) in (0, POLICIES)]
    assert {name: used for name in names if (used := _uses(name, {"jax", "jaxlib"}))} == {}


def test_policies_simulated_nodes_and_what_they_import_are_pure() -> None:
    closure, new = set(PURE), set(PURE)
    while new:
        new = {other for name in new for other in _own(name)} - closure
        closure |= new
    assert {name: used for name in closure if (used := _uses(name, PURE_FORBIDDEN))} == {}


LOADED = """
import importlib, sys
bare = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, *sys.modules.keys() - bare)
    bare |= sys.modules.keys()
"""


def test_importing_them_loads_nothing_impure() -> None:
    """One after the other in one process: what a module loads is told with the first that asks for it."""
    # What the interpreter holds before the imports is not the policies' doing: `time` is built in, and an
    # editable install's start-up hook may bring in more.
    command = [sys.executable, "-c", LOADED, *PURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name: set(new) for name, *new in map(str.split, done.stdout.splitlines())}
    assert loaded.keys() == set(PURE) <= set().union(*loaded.values())
    assert {name: found for name, new in loaded.items() if (found := new & PURE_FORBIDDEN)} == {}


def test_nothing_unsafe_is_used() -> None:
    found = [f"{name}: {used}" for name in FILES if (used := _uses(name, NEVER))]
    for name in FILES:
        for node in ast.walk(_tree(name)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            unpickles = isinstance(node, ast.keyword) and node.arg == "allow_pickle"
            if called in ("eval", "exec") or unpickles:
                found.append(f"{name}: {ast.unparse(node)}")
    assert found == []


def test_only_the_command_line_reads_flags_and_environment() -> None:
    library = [name for name in FILES if _floor(name) != len(FLOORS) - 1]
    found = [f"{name}: {used}" for name in library if (used := _uses(name, {"absl.flags", "absl.app"}))]
    for name in library:
        reads = {ast.unparse(n) for n in ast.walk(_tree(name)) if isinstance(n, ast.Attribute)}
        found += [f"{name}: {read}" for read in reads & {"os.environ", "os.getenv"}]
    assert found == []


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in lengths.items() if n >= MAX_LINES} == {}


def test_every_source_names_its_licence() -> None:
    sources = _sources("jgr", "tools", "tests", "benchmarks", "configs")
    spdx = "# SPDX-License-Identifier: Apache-2.0\n"
    assert [_name(path) for path in sources if not path.read_text().startswith(spdx)] == []
