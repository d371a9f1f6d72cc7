# SPDX-License-Identifier: Apache-2.0
"""A trace of known events is summed as by hand; a traced model shows its stages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jgr.evaluation.profiling import (
    Event,
    Instruction,
    ProfilingError,
    read_events,
    read_program,
    stage_of,
    summarize,
)
from tests.commands import command

HLO = """
ENTRY %main.1 (p0: f32[2,3]) -> (f32[2,3]) {
  %p0 = f32[2,3]{1,0} parameter(0)
  %while.6 = (s32[], f32[3,2]{1,0}, /*index=5*/f32[2]{0}) while(%t), body=%b, metadata={op_name="jit(f)/prefill/while"}
  dot.7 = f32[2,3]{1,0} dot(%p0, %p0), metadata={op_name="jit(f)/prefill/while/body/attention/dot_general"}
  ROOT %wrapped_add.2 = (f32[2,3]{1,0}) fusion(%p0), kind=kLoop, calls=%c
}
"""


def test_a_programs_text() -> None:
    assert read_program(HLO) == {
        "p0": Instruction("parameter", ""),
        "while.6": Instruction("while", "jit(f)/prefill/while"),
        "dot.7": Instruction("dot", "jit(f)/prefill/while/body/attention/dot_general"),
        "wrapped_add.2": Instruction("fusion", ""),
    }


@pytest.mark.parametrize(
    ("source", "stage"),
    [
        ("jit(recommend)/prefill/while/body/closed_call/attention/dot_general", "prefill/attention"),
        ("jit(recommend)/decode/while/body/mlp/jit(silu)/logistic", "decode/mlp"),
        ("jit(recommend)/beam_step_2/top_k", "beam step"),
        ("jit(recommend)/beam_step_2/head/dot_general", "beam step/head"),
        ("jit(rank)/score_1/sub", "score"),
        ("jit(recommend)/prefill/gather", "prefill"),
        ("jit(recommend)/broadcast_in_dim", "other"),
        ("", "other"),
    ],
)
def test_stages(source: str, stage: str) -> None:
    assert stage_of(source) == stage


def test_sums_are_those_by_hand() -> None:
    two = {
        "dot.7": Instruction("dot", "jit(g)/decode/mlp/dot"),
        "top": Instruction("sort", "jit(g)/beam_step_1/top_k"),
    }
    events = [
        Event("a", 1, "while.6", 0, 100),  # contains the next two
        Event("a", 1, "dot.7", 10, 30),
        Event("a", 1, "dot.7", 50, 40),
        Event("b", 1, "wrapped_add.2", 80, 30),  # beside the second dot for 10
        Event("a", 2, "dot.7", 200, 5),
        Event("a", 2, "top", 205, 1),
        Event("a", 3, "unknown", 300, 2),
    ]
    found = summarize(events, [read_program(HLO), two], 1000)
    assert found.stage_ns == {"prefill/attention": 70, "other": 32, "decode/mlp": 5, "beam step": 1}
    assert [(op.name, op.stage, op.calls, op.total_ns) for op in found.operations] == [
        ("dot.7", "prefill/attention", 2, 70),
        ("wrapped_add.2", "other", 1, 30),
        ("dot.7", "decode/mlp", 1, 5),
        ("unknown", "other", 1, 2),
        ("top", "beam step", 1, 1),
    ]
    assert (found.busy_ns, found.window_ns) == (30 + 60 + 6 + 2, 1000)


def test_a_folder_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ProfilingError, match="holds 0 traces instead of one"):
        read_events(tmp_path)


RUN = "import sys; from jgr.cli.main import run; sys.exit(run(['profile', *sys.argv[1:]]))"


def profile(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_models_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.serving.tiny_model import make_folder

    make_folder(tmp_path / "tiny", depth=2)
    bodies = [
        {"history": ["B001", "B002"], "top_k": 2},
        {"history": ["B003"], "candidates": ["B004", "B005"]},
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    settings = [
        f"--set={field}"
        for field in (f"model.path={tmp_path / 'tiny'}", "model.compilation_cache=", "beam.width=4", "profiles.batch=1",
                      "profiles.tokens=32", "profiles.widths=4", "profiles.candidates=4", "prompt.max_items=8")
    ]  # fmt: skip
    asked = ("--requests=6", "--top=100000", f"--out={tmp_path / 'trace'}")
    done = profile(*settings, f"--requests_file={requests}", *asked)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    stages = report["stages_ms"]
    for stage in ("prefill/attention", "prefill/mlp", "decode/attention", "decode/mlp", "beam step", "score"):
        assert stages[stage] > 0, stage
    calls = Counter[str]()
    for op in report["operations"]:
        calls[op["stage"]] += op["calls"]
    # By number, not by time: one that another process interrupts can take as long as all.
    assert calls["other"] < 0.3 * calls.total()
    assert 0 < report["busy_ms"] <= report["wall_ms"]
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    longest = report["operations"][:6]
    assert len(longest) == 6 and all(op["ms"] > 0 for op in longest)

    # What is refused needs no process of its own.
    again = ("profile", *settings, f"--requests_file={requests}")
    assert command(*again, f"--out={tmp_path / 'trace'}") == 2
    assert "is not empty" in capsys.readouterr().err
    for line, message in (
        ('{"history": ["B001"], "candidates": ["B077"]}', "item 'B077' is not in the catalog"),
        ('{"history": 3}', "requests.jsonl:1: history"),
    ):
        requests.write_text(line + "\n")
        assert command(*again) == 2
        assert message in capsys.readouterr().err
