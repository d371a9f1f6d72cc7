# SPDX-License-Identifier: Apache-2.0
"""Our side of the conversation with a peer: another program in a process, and a virtual environment, of its own.

A peer is found through an environment variable that names its Python. Where that is not set the peer is missing, which
a benchmark states in its result. A peer's process sees as many cores as ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.harness import ROOT, Missing, note

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kind:
    """A peer. module: benchmarks.peers.<module>; variable: names its Python; requirements: a file beside it."""

    name: str
    module: str
    variable: str
    requirements: str


TRANSFORMERS = Kind("transformers", "transformers_peer", "JGR_PEERS_TORCH", "requirements-torch.txt")
PYTORCH = Kind("pytorch", "pytorch_peer", "JGR_PEERS_TORCH", "requirements-torch.txt")
COMPILED = Kind("compiled", "compiled_peer", "JGR_PEERS_TORCH", "requirements-torch.txt")
VLLM = Kind("vllm", "vllm_peer", "JGR_PEERS_VLLM", "requirements-vllm.txt")
OPENVINO = Kind("openvino", "openvino_peer", "JGR_PEERS_OPENVINO", "requirements-openvino.txt")


class PeerError(RuntimeError):
    """A peer ended or gave no proper answer; the message holds the end of what it wrote to stderr."""


class Peer:
    """A running peer. Use as a context manager: leaving it ends the process."""

    def __init__(self, kind: Kind, command: list[str], environment: Mapping[str, str], threads: int) -> None:
        self.kind = kind
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        settings = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), **environment}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        try:
            self.versions: dict[str, str] = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. PeerError where the peer has died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reading says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def check(self) -> None:
        """Raise PeerError where the peer has died."""
        code = self._process.poll()
        if code is not None:
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace")[-2000:]
            raise PeerError(f"{self.kind.name} ended with code {code}: {said}")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()  # what it writes as it ends comes after its output is closed
            self.check()
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the process: by the end of its input, or, where it takes no notice, by a signal."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start(kind: Kind, folder: Path, threads: int, dtype: str = "float32") -> Peer:
    """Start a peer on a model's folder, to compute in a type. Missing says what to install and to set."""
    python = os.environ.get(kind.variable, "")
    if not python:
        raise Missing(
            f"{kind.name}: set {kind.variable} to the Python of a virtual environment with "
            f"{(HERE / kind.requirements).relative_to(ROOT)}"
        )
    if not os.access(python, os.X_OK):
        raise Missing(f"{kind.name}: {kind.variable}={python} is no program")
    note(f"starting {kind.name}")
    command = [python, "-m", f"benchmarks.peers.{kind.module}", str(folder), dtype]
    return Peer(kind, command, _environment(kind, python), threads)


def _environment(kind: Kind, python: str) -> dict[str, str]:
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if kind is VLLM:
        # Its documentation asks for Intel's OpenMP ahead of every other.
        found = sorted((Path(python).parent.parent / "lib").glob("libiomp5.so"))
        settings |= {"LD_PRELOAD": str(found[0])} if found else {}
    return settings


class Present(NamedTuple):
    """peers: those that run, by name. missing: for each other one, the line that says what to install."""

    peers: dict[str, Peer]
    missing: dict[str, str]


def start_all(
    kinds: tuple[Kind, ...], folder: Path, threads: int, stack: ExitStack, dtype: str = "float32"
) -> Present:
    """Start the peers that there are; they end with `stack`. Missing where there is none."""
    found = Present({}, {})
    for kind in kinds:
        try:
            found.peers[kind.name] = stack.enter_context(start(kind, folder, threads, dtype))
        except Missing as e:
            found.missing[kind.name] = str(e)
    if not found.peers:
        raise Missing("; ".join(found.missing.values()))
    return found
