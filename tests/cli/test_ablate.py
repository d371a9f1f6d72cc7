# SPDX-License-Identifier: Apache-2.0
"""`jgr ablate` as a user meets it; what engines count and answer is in tests/ablation."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import jgr
from jgr.ablation import worlds
from jgr.ablation.mechanisms import SYSTEMS
from jgr.cli import ablate
from jgr.cli.main import run
from jgr.client import embedded
from jgr.config import Config
from jgr.serving.api import Answer, Item, Timing, Usage

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


class FakeEngine:
    """Answers by the length of the history, with the items first where it always does so; counts what it was asked."""

    made: ClassVar[list[FakeEngine]] = []
    wrong = 0.0
    interrupted = False
    top_k = 0

    def __init__(self, config: Config, kinds: list[str]) -> None:
        self.config, self.kinds, self.asked, self.closed = config, kinds, 0, False
        FakeEngine.made.append(self)

    def rank(self, history: Any, candidates: Any, user_id: Any, layout: Any = None) -> Any:
        assert self.kinds == ["rank"], "an engine is made for what it is asked, and for nothing else"
        return self._answers(history, candidates, layout)

    def _answers(self, history: Any, candidates: Any, layout: Any = None) -> Any:
        if FakeEngine.interrupted and len(FakeEngine.made) == 3:
            raise KeyboardInterrupt
        if layout is not None:
            return self._answer(history, candidates, layout)
        self.asked += len(history)
        first = "item_prefix" if self.config.cache.policy == "item" else "user_prefix"
        return [self._answer(one, of, first) for one, of in zip(history, candidates, strict=True)]

    def recommend(self, history: Any, user_id: Any, top_k: int) -> Any:
        assert self.kinds == ["recommend"]
        FakeEngine.top_k = top_k
        return self._answers(history, [["a"]] * len(history))

    def _answer(self, history: list[str], candidates: list[str], layout: Any) -> Answer:
        shift = FakeEngine.wrong if self.config.cache.policy == "item" else 0.0
        items = [
            Item(item_id=item, score=len(history) - at + shift, rank=at)
            for at, item in enumerate(candidates, 1)
        ]
        usage = Usage(prompt_tokens=1, layout=layout, history_items=1, unknown_items=0, unknown_item_ids=[])
        timing = Timing(queue=0.0, prepare=0.0, device=0.0, total=0.0)
        return Answer(id="", model="", catalog_version="", items=items, usage=usage, timing_ms=timing)

    def metrics(self) -> str:
        return (
            f'# TYPE jgr_prompt_tokens counter\njgr_prompt_tokens_total{{source="computed"}} {self.asked}\n'
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """No engine is made, and the world is small unless another size is asked for."""
    monkeypatch.setattr(embedded, "Engine", FakeEngine)
    monkeypatch.setattr(worlds.made, "__defaults__", (worlds.TINY,))
    monkeypatch.setattr(FakeEngine, "made", [])
    return FakeEngine


def test_it_runs_what_was_chosen_and_writes_all_of_it(
    fake: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    level = logging.getLogger("jgr.serving").level
    code = run(
        ["ablate", "bat", "--only=users-first,repair", "--requests=10", "--rounds=2", "--candidates=2,3",
         "--set", "cache.device_mb=2", "--set=server.api_key=hidden-0123", f"--out={out}", f"--plot={picture}"]
    )  # fmt: skip
    assert code == 0
    assert logging.getLogger("jgr.serving").level == level, "others in this process log as before"
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    names = ["all on", "without users-first", "with repair", "all off"]
    assert [one["name"] for one in found["variants"]] == names
    assert [one.asked for one in fake.made] == [10] * 4
    assert all(one.closed for one in fake.made)
    assert {one.config.cache.device_mb for one in fake.made} == {2.0}
    assert [one.config.cache.policy for one in fake.made] == ["hotness", "item", "hotness", "none"]
    assert [one["counts"]["computed"] for one in found["variants"]] == [10] * 4
    assert [one["answers"]["right"] for one in found["variants"]] == [True] * 4
    assert found["variants"][1]["answers"]["other_prefix"] == 10
    assert found["variants"][1]["numbers"] == ["BAT-4"]
    assert {"machine", "versions", "commit", "date", "load", "untimed", "requests"} <= set(found)
    assert found["versions"]["jgr"] == jgr.__version__
    assert found["requests"] == 10
    assert found["load"] == {
        "model": None, "seed": 0, "users": 60, "rounds": 2, "concurrency": 4, "candidates": [2, 3],
        "set": ["cache.device_mb=2", "server.api_key=***"],
    }  # fmt: skip
    assert "hidden-0123" not in out.read_text() + printed
    for name in names:
        assert f"\n{name} " in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not Path(fake.made[0].config.model.path).exists(), "the model is gone with the command"


def test_quick_is_a_tiny_model_and_a_tenth_of_the_requests(
    fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[worlds.Size]()
    made = worlds.made

    def noted(system: Any, folder: Path, size: worlds.Size = worlds.DEFAULT) -> worlds.World:
        sizes.append(size)
        return made(system, folder, size)

    monkeypatch.setattr(worlds, "made", noted)
    assert run(["ablate", "bat", "--quick", "--only=users-first"]) == 0
    assert (sizes, {one.asked for one in fake.made}) == ([worlds.TINY], {48})


@pytest.mark.parametrize(("width", "top_k"), [(4, 4), (16, 10)])
def test_no_more_items_are_asked_for_than_there_are_beams(
    fake: type[FakeEngine], width: int, top_k: int
) -> None:
    beams = ["--set", f"beam.width={width}", "--set", f"profiles.widths={width}"]
    assert run(["ablate", "xgr", "--only=lengths", "--requests=2", "--rounds=1", *beams]) == 0
    assert fake.top_k == top_k


def test_answers_that_must_be_the_same_and_are_not_end_it_with_1(
    fake: type[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "wrong", 0.5)
    assert run(["ablate", "bat", "--only=users-first", "--requests=4", "--rounds=1"]) == 1
    printed = capsys.readouterr().out
    assert "answers that must be the same are not: without users-first\n" in printed
    assert "WRONG: differ by 0.5" in printed


def test_an_interrupt_ends_it_with_130_and_leaves_nothing(
    fake: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "interrupted", True)
    monkeypatch.setattr("os._exit", lambda code: None)  # which ends the process where JAX is loaded
    assert run(["ablate", "bat", "--only=users-first", "--requests=4", "--rounds=1"]) == 130
    assert len(fake.made) == 3
    assert all(one.closed for one in fake.made)
    assert not Path(fake.made[0].config.model.path).exists()


def test_the_list_has_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ablate", "--list"]) == 0
    printed = capsys.readouterr().out
    for system in SYSTEMS.values():
        assert f"{system.name}: {system.title}" in printed
    assert "BAT-5: without items-first: cache.policy=user\n" in printed


def test_the_list_of_one_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ablate", "xgr", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "XGR-14" in printed
    assert "BAT-5" not in printed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "name what to take apart: jgr ablate bat|xgr|flame|rcllm|hlem"),
        (["bta"], "no system 'bta' to take apart; the nearest is 'bat'"),
        (["bat", "xgr"], "unexpected argument 'xgr'"),
        (["bat", "--only=user-first"], "bat has no mechanism 'user-first'; the nearest is 'users-first'"),
        (["bat", "--candidates=7,3"], "--candidates must be a number, or LEAST,MOST"),
        (["bat", "--candidates=x"], "--candidates must be a number"),
        (
            ["bat", "--set", "cache.policy=user"],
            "--set cache.policy=user: the ablation itself sets this field",
        ),
        (["bat", "--quick", "--model=x"], "--quick draws a tiny model of its own"),
        (["bat", "--plot=found.txt"], "--plot must name a file that ends in .png or .svg"),
        (["bat", "--out=/no/such/found.json"], "--out: there is no folder /no/such"),
        (["bat", "--out=/tmp"], "--out: /tmp is a folder"),
        (["bat", "--rounds=1001"], "rounds"),
        (["bat", "--config=shop"], "--config: jgr ablate takes a model's folder"),
        (["bat", "--data=x"], "--data: the users of a dataset need a model"),
        (["bat", "--model=/no/such"], "there is no model folder /no/such"),
    ],
)
def test_mistakes_are_one_line(
    fake: type[FakeEngine], capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert run(["ablate", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]
    assert fake.made == []


def test_a_field_that_the_ablation_sets_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worlds, "made", None)  # a call of it would be a defect, and end with 1
    assert run(["ablate", "xgr", "--only=lengths", "--set", "profiles.batch=1"]) == 2
    assert "--set profiles.batch=1: the ablation itself sets this field" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "name"), [("--out", "found.json"), ("--plot", "found.png")])
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    fake: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    name: str,
) -> None:
    monkeypatch.setattr(ablate.os, "access", lambda path, how: False)
    assert run(["ablate", "bat", f"{flag}={tmp_path / name}"]) == 2
    assert f"{flag}: nothing can be written to the folder {tmp_path}" in capsys.readouterr().err
    assert fake.made == []


def test_a_model_of_the_wrong_sort_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worlds.made(SYSTEMS["flame"], tmp_path / "climber", worlds.TINY)
    assert run(["ablate", "bat", f"--model={tmp_path / 'climber'}"]) == 2
    assert "is a scorer; bat takes a decoder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flame", "hlem"])
def test_a_model_that_reads_times_is_asked_with_times(
    fake: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The demo's users have none, so that is what it ends with."""

    class Timed:
        info = SimpleNamespace(timed=True)

    monkeypatch.setattr(embedded, "Engine", lambda config, **_: nullcontext(Timed()))
    worlds.made(SYSTEMS[name], tmp_path / "model", worlds.TINY)
    assert run(["ablate", name, f"--model={tmp_path / 'model'}"]) == 2
    assert "the model reads times, which the dataset does not have" in capsys.readouterr().err


def test_help_loads_nothing_slow() -> None:
    code = RUN.replace("sys.exit(run())", "run(['ablate', '--list']); print(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "matplotlib", "tokenizers"} & set(done.stdout.splitlines()[-1].split())
