# SPDX-License-Identifier: Apache-2.0
"""The conversation with a peer: what it answers, how it ends, and that one that is not there is said to be missing."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness import Missing
from benchmarks.peers import client
from benchmarks.peers.client import OPENVINO, VLLM, Kind, Peer, PeerError
from benchmarks.peers.lines import timed

KIND = Kind("adder", "adder_peer", "JGR_PEERS_ADDER", "requirements-torch.txt")
ADDER = """
import os, sys
from benchmarks.peers.lines import serve
def load(folder):
    print("libraries print", folder)
    def answer(request):
        print("and print")
        if not request["numbers"]:
            sys.exit("nothing to add")
        return {"sum": sum(request["numbers"]), "threads": os.environ["OMP_NUM_THREADS"]}
    return answer
serve(load, ("numpy",))
"""


def test_a_peer_answers_line_by_line_whatever_it_prints(tmp_path: Path) -> None:
    with Peer(KIND, [sys.executable, "-c", ADDER, str(tmp_path)], {}, threads=2) as peer:
        assert set(peer.versions) == {"numpy"}
        assert peer.ask(numbers=[1, 2]) == {"sum": 3, "threads": "2"}
        assert peer.ask(numbers=[5])["sum"] == 5
        with pytest.raises(PeerError, match=r"adder ended with code 1: [^$]*nothing to add"):
            peer.ask(numbers=[])


def test_a_peer_that_cannot_load_says_why() -> None:
    code = "raise SystemExit('no such library')"
    with pytest.raises(PeerError, match="adder ended with code 1: no such library"):
        Peer(KIND, [sys.executable, "-c", code], {}, threads=1)


def test_peers_without_a_python_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VLLM.variable, raising=False)
    monkeypatch.setenv(OPENVINO.variable, str(tmp_path / "python"))
    with ExitStack() as stack, pytest.raises(Missing) as raised:
        client.start_all((VLLM, OPENVINO), tmp_path, 1, stack)
    said = str(raised.value)
    assert "vllm: set JGR_PEERS_VLLM to the Python of a virtual environment" in said
    assert "benchmarks/peers/requirements-vllm.txt" in said
    assert f"openvino: JGR_PEERS_OPENVINO={tmp_path / 'python'} is no program" in said


def test_every_peer_has_its_module_and_pinned_requirements() -> None:
    for kind in (client.TRANSFORMERS, client.PYTORCH, client.COMPILED, VLLM, OPENVINO):
        assert (client.HERE / f"{kind.module}.py").is_file()
        lines = (client.HERE / kind.requirements).read_text().splitlines()
        assert lines and all("==" in line for line in lines if not line.startswith("#"))


def test_what_comes_before_a_call_is_not_timed() -> None:
    happened: list[str] = []

    def call() -> int:
        happened.append("call")
        return len(happened)

    ms, last = timed(call, 0.0, before=lambda: happened.append("before"))
    assert happened == ["before", "call"]
    assert last == 2
    assert ms >= 0
