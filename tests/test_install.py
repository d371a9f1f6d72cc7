# SPDX-License-Identifier: Apache-2.0
"""jgr as a user installs it: the wheel in environments of their own, away from the checkout.

An environment holds what the wheel asks for and nothing else. Those packages are linked from the ones that the tests
run with, so nothing is downloaded, and `pip check` says whether what the wheel asks for is there. `make test-lowest`
installs from the registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import jgr
from jgr import extras, named_configs
from jgr.config import load_config, to_json

ROOT = Path(__file__).resolve().parents[1]
SERVING_MB = 150
"""What serving may take above jax and what jax itself needs."""
PATIENCE_S = 120.0


def requirements(dist: Distribution, extra: str = "") -> Iterator[Requirement]:
    """What a package asks for on this machine, with one of its extras."""
    for text in dist.requires or ():
        required = Requirement(text)
        if required.marker is None or required.marker.evaluate({"extra": extra}):
            yield required


def closure(*wanted: str) -> dict[str, Distribution]:
    """The packages by name, and all that they need. wanted: requirements as pip takes them."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in wanted]
    seen = set()
    while waiting:
        required = waiting.pop()
        if str(required) in seen:
            continue
        seen.add(str(required))
        dist = distribution(required.name)
        found[dist.metadata["Name"]] = dist
        for extra in ("", *required.extras):
            waiting += requirements(dist, extra)
    return found


def files(dist: Distribution) -> Iterator[tuple[Path, Path]]:
    """(place inside site-packages, place on the disk) of every file of a package."""
    for file in dist.files or ():
        if ".." not in file.parts:
            yield Path(file), Path(str(dist.locate_file(file)))


def size_mb(packages: dict[str, Distribution]) -> float:
    """What the packages take on the disk, in units of 1e6 bytes."""
    return sum(path.stat().st_size for dist in packages.values() for _, path in files(dist)) / 1e6


class Environment:
    """A virtual environment without pip. packages: what is in it beside jgr's wheel."""

    def __init__(self, folder: Path, packages: dict[str, Distribution], wheel: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        place = next(folder.glob("lib/python*/site-packages"))
        for dist in packages.values():
            for inside, path in files(dist):
                (place / inside).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, place / inside)
                except OSError:  # another file system
                    shutil.copy2(path, place / inside)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.bin / "python"),
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        self.check = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.env |= {"HOME": str(folder), "PYTHONNOUSERSITE": "1"}

    def jgr(self, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        command = [str(self.bin / "jgr"), *argv]
        return subprocess.run(
            command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, so that nothing old of build/ gets into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jgr", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", str(out), str(source)], check=True)
    (found,) = out.glob("jgr-*.whl")
    return found


@pytest.fixture(scope="module")
def base(wheel: Path) -> dict[str, Distribution]:
    """What the wheel asks for without an extra."""
    return closure(*asked(wheel))


def asked(wheel: Path, extra: str = "") -> list[str]:
    """What the wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [Requirement(line.split(": ", 1)[1]) for line in lines if line.startswith("Requires-Dist: ")]
    taken = [one for one in required if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}" for one in taken]


@pytest.fixture(scope="module")
def serving(
    wheel: Path, base: dict[str, Distribution], tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    return Environment(tmp_path_factory.mktemp("serving"), base, wheel)


def test_the_wheel_holds_the_package_and_its_configurations_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT)
        for path in (ROOT / "jgr").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    configs = {Path("jgr") / path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py")}
    assert names == sources | configs
    assert Path("jgr/serving/http/ui/app.js") in names


def test_serving_alone_is_small(base: dict[str, Distribution]) -> None:
    jax = closure("jax")
    own = {name: dist for name, dist in base.items() if name not in jax}
    assert {"tensorstore", "uvicorn", "tokenizers"} <= own.keys()
    assert not {"optax", "grain", "orbax-checkpoint", "matplotlib"} & own.keys()
    assert size_mb(own) < SERVING_MB, {name: round(size_mb({name: dist}), 1) for name, dist in own.items()}


def test_only_training_imports_what_its_extra_installs() -> None:
    """Every other module, imported where the extras are not installed."""
    hidden = [module for modules in extras.MODULES.values() for module in modules]
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({hidden!r}))
import jgr
for module in pkgutil.walk_packages(jgr.__path__, "jgr."):
    if not module.name.startswith(("jgr.training", "jgr.evaluation.validation")):
        importlib.import_module(module.name)
print(len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_command_works_without_a_checkout(serving: Environment, tmp_path: Path) -> None:
    assert (serving.check.returncode, serving.check.stdout) == (0, "No broken requirements found.\n")
    assert serving.jgr("--version", cwd=tmp_path).stdout == f"{jgr.__version__}\n"
    shown = serving.jgr("config", "--config=industrial", cwd=tmp_path)
    assert json.loads(shown.stdout) == to_json(load_config(ROOT / "configs" / "industrial.py"))
    listed = serving.jgr("config", "--list", cwd=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()[:-1]] == named_configs.names()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "missing"),
    [
        (("train", "--config=industrial"), "jgr train needs grain, matplotlib, optax, orbax"),
        (("demo",), "jgr demo needs grain, matplotlib, optax, orbax"),
        (("convert",), "jgr convert needs grain, matplotlib, optax, orbax"),
    ],
)
def test_a_missing_extra_is_one_line(
    serving: Environment, tmp_path: Path, argv: tuple[str, ...], missing: str
) -> None:
    done = serving.jgr(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"jgr: {missing}: pip install 'jgr[train]'\n"


@pytest.mark.slow
def test_what_one_environment_trains_another_serves(
    wheel: Path, serving: Environment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project = tmp_path_factory.mktemp("project")
    training = Environment(
        tmp_path_factory.mktemp("training"), closure(*asked(wheel), *asked(wheel, "train")), wheel
    )
    assert training.check.returncode == 0, training.check.stdout
    trained = training.jgr(
        "train", "--config=shop", "--set=train.steps=2", "--set=profiles.batch=1", cwd=project
    )
    assert (trained.returncode, trained.stdout) == (0, "runs/shop\n"), trained.stderr
    assert (project / "runs/shop/curves.png").is_file()

    server = subprocess.Popen(
        [str(serving.bin / "jgr"), "serve", "runs/shop", "--port=0"],
        cwd=project, env=serving.env, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        ask = (
            f"import jgr; print(jgr.Client({url!r}).recommend(['S0003', 'S0025'], top_k=3).items[0].item_id)"
        )
        asked_by = [str(serving.bin / "python"), "-c", ask]
        item = subprocess.run(
            asked_by, cwd=project, env=serving.env, capture_output=True, text=True, check=True
        )
        assert re.fullmatch(r"S\d{4}\n", item.stdout)
        loaded = serving.jgr("bench", "serve", "runs/shop", f"--url={url}", "--duration=0.5", cwd=project)
        assert json.loads(loaded.stdout.splitlines()[-1])["answered"].keys() == {"200"}, loaded.stderr
        picture = serving.jgr("bench", "serve", "runs/shop", "--rates=1", "--plot=a.png", cwd=project)
        assert picture.stderr == "jgr: --plot needs matplotlib: pip install 'jgr[plot]'\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def test_the_modules_of_an_extra_are_those_of_its_packages() -> None:
    declared = project()["optional-dependencies"]
    for extra, modules in extras.MODULES.items():
        packages = [re.split(r"[^a-z]", Requirement(text).name)[0] for text in declared[extra]]
        assert set(packages) == set(modules), extra


def test_the_lowest_lock_has_the_lowest_versions() -> None:
    """Who lowers or raises a bound runs `make lock`, and so has it tested."""
    lock = (ROOT / "requirements" / "lowest-py311.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)(?:\[[a-z0-9,]+\])?==(\S+)", lock, re.MULTILINE))
    declared = project()
    by_extra = declared["optional-dependencies"]
    texts = [*declared["dependencies"], *by_extra["train"], *by_extra["otel"], *by_extra["test"]]
    lowest = {
        one.name: bound.version
        for one in map(Requirement, texts)
        for bound in one.specifier
        if bound.operator == ">="
    }
    assert len(lowest) > 20

    wrong = {
        name: (low, pins[name]) for name, low in lowest.items() if not f"{pins[name]}.".startswith(f"{low}.")
    }
    assert wrong == {}


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    version, day = headings[1]
    assert version == jgr.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
