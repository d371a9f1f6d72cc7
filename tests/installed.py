# SPDX-License-Identifier: Apache-2.0
"""jgr as a user installs it: its wheel in environments of their own, away from the checkout.

An environment holds what the wheel asks for and nothing else. Those packages are linked from the ones that the tests
run with, so nothing is downloaded, and `pip check` says whether what the wheel asks for is there. `make test-lowest`
installs from the registry.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

import jgr
from tools.packages import files

ROOT = Path(jgr.__file__).resolve().parents[1]
PATIENCE_S = 300.0


class Environment:
    """A virtual environment without pip. packages: what is in it beside jgr's wheel."""

    def __init__(self, folder: Path, packages: dict[str, Distribution], wheel: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        place = next(folder.glob("lib/python*/site-packages"))
        for dist in packages.values():
            for inside, path in files(dist):
                _link(path, place / inside)
                compiled = _compiled(path)  # installers need not list it
                if compiled.is_file():
                    _link(compiled, _compiled(place / inside))
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

    @contextmanager
    def serve(self, *argv: str, cwd: Path) -> Iterator[str]:
        """`jgr serve` on a free port: its URL. It must end by SIGTERM with exit code 0."""
        with (cwd / "server.log").open("w") as log:
            server = subprocess.Popen(
                [str(self.bin / "jgr"), "serve", *argv, "--port=0"],
                cwd=cwd, env=self.env, text=True, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        with server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                assert url.startswith("http"), (cwd / "server.log").read_text()
                yield url
                server.send_signal(signal.SIGTERM)
                assert server.wait(PATIENCE_S) == 0
            finally:
                server.kill()


def _compiled(path: Path) -> Path:
    """Where Python keeps what it has compiled of a module; a folder for what is none."""
    return Path(importlib.util.cache_from_source(str(path))) if path.suffix == ".py" else path.parent


def _link(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, place)
    except FileExistsError:  # two packages have the same file of a namespace
        pass
    except OSError:  # another file system
        shutil.copy2(path, place)


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel, built from a copy of the sources in `source`, so that nothing old of build/ gets into it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jgr", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-w", str(out), str(source)], check=True)
    (found,) = out.glob("jgr-*.whl")
    return found


def asked(wheel: Path, extra: str = "") -> list[str]:
    """What the wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [Requirement(line.split(": ", 1)[1]) for line in lines if line.startswith("Requires-Dist: ")]
    taken = [one for one in required if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [f"{one.name}{'[' + ','.join(one.extras) + ']' if one.extras else ''}" for one in taken]
