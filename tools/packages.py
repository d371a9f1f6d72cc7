# SPDX-License-Identifier: Apache-2.0
"""What installed packages ask for and take on the disk, by their own records."""

from __future__ import annotations

import py_compile
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

import jgr


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


def own_mb() -> float:
    """What jgr's own files take once they are installed, in units of 1e6 bytes: with those that pip compiles."""
    root = Path(jgr.__file__).parents[1]
    found = [path for path in (root / "jgr").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found += (root / "configs").glob("*.py")
    total = sum(path.stat().st_size for path in found)
    with TemporaryDirectory() as folder:
        compiled = Path(folder) / "compiled"
        for path in found:
            if path.suffix == ".py":
                py_compile.compile(str(path), str(compiled), doraise=True)
                total += compiled.stat().st_size
    return total / 1e6


def size_mb(packages: Mapping[str, Distribution]) -> float:
    """What the packages take on the disk, in units of 1e6 bytes."""
    return sum(path.stat().st_size for dist in packages.values() for _, path in files(dist)) / 1e6
