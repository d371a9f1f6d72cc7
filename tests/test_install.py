# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds and asks for, and that serving stays small. tests/test_journeys.py uses it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import jgr
from jgr import extras
from jgr.fields import UserError
from tests.installed import ROOT, asked
from tools.packages import closure, own_mb, size_mb

SERVING_MB = 150
"""What serving may take above jax and what jax itself needs."""


@pytest.fixture(scope="module")
def base(wheel: Path) -> dict[str, Distribution]:
    """What the wheel asks for without an extra."""
    return closure(*asked(wheel))


def test_the_wheel_holds_the_package_and_its_configurations_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    files = {path.relative_to(ROOT) for path in (ROOT / "jgr").rglob("*") if path.is_file()}
    sources = {path for path in files if "__pycache__" not in path.parts}
    configs = {Path("jgr") / path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.py")}
    assert names == sources | configs
    assert Path("jgr/serving/http/ui/app.js") in names


def test_serving_alone_is_small(base: dict[str, Distribution]) -> None:
    """With jgr's own files, and what pip compiles of them."""
    jax = closure("jax")
    own = {name: dist for name, dist in base.items() if name not in jax}
    assert {"tensorstore", "uvicorn", "tokenizers"} <= own.keys()
    assert not {"optax", "grain", "orbax-checkpoint", "matplotlib", "redis"} & own.keys()
    of = {"jgr": own_mb(), **{name: size_mb({name: dist}) for name, dist in own.items()}}
    assert sum(of.values()) < SERVING_MB, of


OF_EXTRAS = (
    "jgr.training",
    "jgr.evaluation.validation",
    *(f"jgr.simulation.controller.{name}" for name in ("boosting", "episodes", "ppo", "train")),
    "jgr.features.redis_store",
    "jgr.bounded_redis",
    "jgr.embeddings.redis_shard",
    *(f"jgr.library.{name}" for name in ("build", "clusters", "finder", "index")),
    *(
        f"jgr.serving.cluster.{name}"
        for name in ("application", "coordinator", "front", "replicas", "router", "scaling")
    ),
)
"""The modules that import what an extra installs."""


def test_only_what_extras_are_for_imports_what_they_install() -> None:
    """Every other module, imported where the extras are not installed."""
    hidden = [module for modules in extras.MODULES.values() for module in modules]
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({hidden!r}))
import jgr
for module in pkgutil.walk_packages(jgr.__path__, "jgr."):
    if not module.name.startswith({OF_EXTRAS!r}):
        importlib.import_module(module.name)
print(len(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_that_a_command_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"grain", "optax", "orbax"}
    monkeypatch.setattr(extras, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(UserError) as raised:
        extras.require("train", "jgr tune", "tune")
    assert str(raised.value) == "jgr tune needs matplotlib, optuna: pip install 'jgr[train,tune]'"
    there.add("matplotlib")
    with pytest.raises(UserError, match=r"^jgr tune needs optuna: pip install 'jgr\[tune\]'$"):
        extras.require("train", "jgr tune", "tune")
    there.add("optuna")
    extras.require("train", "jgr tune", "tune")


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def test_the_modules_of_an_extra_are_those_of_its_packages() -> None:
    declared = project()["optional-dependencies"]
    for extra, modules in extras.MODULES.items():
        packages = [re.split(r"[^a-z]", Requirement(text).name)[0] for text in declared[extra]]
        named = {"nixl": "nixl_cu12", "scikit": "sklearn"}
        assert {named.get(name, name) for name in packages} == set(modules), extra


def test_the_lowest_lock_has_the_lowest_versions() -> None:
    """Who lowers or raises a bound runs `make lock`, and so has it tested."""
    lock = (ROOT / "requirements" / "lowest-py311.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)(?:\[[a-z0-9,]+\])?==(\S+)", lock, re.MULTILINE))
    declared = project()
    by_extra = declared["optional-dependencies"]
    named = ("train", "otel", "redis", "test")
    texts = [*declared["dependencies"], *(text for name in named for text in by_extra[name])]
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
