# SPDX-License-Identifier: Apache-2.0
"""The search for hyper-parameters: ranges, trials that are kept, pruned and gone on with, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from jgr.catalog.catalog import Catalog
from jgr.cli.main import run
from jgr.config import Config, ConfigError, TrainConfig, UserError, load_config, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.models import retrievers
from jgr.training.study import BEFORE_PRUNING, MOST_FAILED, Range, Report, Study, _validations, check, told

CONFIG = Config(train=TrainConfig(model="hstu", evaluate_every=5, steps=10, heads=2, kv_heads=2))
RATE = Range.parse("train.learning_rate=1e-4:1e-2:log")


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a trial its picture is drawn anew, which takes most of the time of a study without a training: of those
    here that of one test is looked at."""
    monkeypatch.setattr(Study, "draw", lambda self: None)


NOTHING_DRAWN = pytest.mark.usefixtures("nothing_drawn")


class Killed(Exception):
    """What ends a process."""


def no_progress(done: int, total: int, status: str) -> None:
    del done, total, status


def train(config: Config, report: Report, scale: float = 1.0) -> None:
    """A training whose second validation is better, the better the nearer the rate is to .003."""
    for step in (0.5, 1.0):
        value = step * scale / (1 + abs(config.train.learning_rate / 0.003 - 1))
        folder = Path(config.train.out)
        folder.mkdir(exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 1, "recall@10": value}) + "\n")
        report(value)


def test_what_a_range_may_be() -> None:
    assert RATE == Range("train.learning_rate", (), 1e-4, 1e-2, log=True)
    assert Range.parse("train.layers=1:4") == Range("train.layers", (), 1, 4, whole=True)
    assert Range.parse("train.hidden=64, 128,64") == Range("train.hidden", ("64", "128"))
    for wrong in ("train.layers", "train.layers=", "train.layers=1:2:lin", "train.layers=a:b", "=1:2"):
        with pytest.raises(UserError, match=r"write section\.field=a,b,c"):
            Range.parse(wrong)
    with pytest.raises(UserError, match="the first number must be below the second"):
        Range.parse("train.layers=2:2")
    with pytest.raises(UserError, match="logarithms need numbers above 0"):
        Range.parse("train.dropout=0:1:log")


@pytest.mark.parametrize(
    ("config", "ranges", "words"),
    [
        (CONFIG, [], "name a field and what to try"),
        (CONFIG, [RATE, RATE], "train.learning_rate is given twice"),
        (CONFIG, [Range.parse("model.name=a,b")], "model.name cannot be varied"),
        (CONFIG, [Range.parse("train.droput=0:1")], "train.droput"),
        (CONFIG, [Range.parse("train.dropout=0.5:1.5")], "train.dropout"),
        (replace(CONFIG, train=replace(CONFIG.train, evaluate_every=0)), [RATE], "train.evaluate_every is 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(config: Config, ranges: list[Range], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(config, ranges)


def test_a_study_finds_the_best_keeps_its_folder_alone_and_draws(tmp_path: Path) -> None:
    study = Study(tmp_path, CONFIG, [RATE])
    study.run(6, train, no_progress)
    best, value, number = study.best()
    values = [row["value"] for row in study.rows() if row["state"] == "complete"]
    assert study.finished == 6
    assert value == max(values) == pytest.approx(1 / (1 + abs(best.train.learning_rate / 0.003 - 1)))
    assert best.train.out == CONFIG.train.out
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"trial-{number}"]
    with Image.open(tmp_path / "trials.png") as picture:
        assert picture.width > picture.height
    assert next(told(study.rows())).split()[1:3] == [str(number), f"{value:.4f}"]


@NOTHING_DRAWN
def test_each_trial_has_a_board_of_its_own(tmp_path: Path) -> None:
    boards: list[str] = []

    def fit(config: Config, report: Report) -> None:
        boards.append(config.train.tensorboard)
        train(config, report)

    study = Study(tmp_path / "study", override(CONFIG, "train.tensorboard=runs/board"), [RATE])
    study.run(2, fit, no_progress)
    assert boards == ["runs/board/trial-0", "runs/board/trial-1"]
    assert study.best()[0].train.tensorboard == "runs/board"


@NOTHING_DRAWN
def test_a_study_goes_on_and_a_trial_that_was_cut_short_keeps_its_folder_and_its_draws(
    tmp_path: Path,
) -> None:
    asked: list[Config] = []

    def killed(config: Config, report: Report) -> None:
        asked.append(config)
        if len(asked) == 3:
            raise Killed
        train(config, report)

    with pytest.raises(Killed):
        Study(tmp_path, CONFIG, [RATE]).run(4, killed, no_progress)
    again = Study(tmp_path, CONFIG, [RATE])
    assert again.finished == 2
    again.run(4, killed, no_progress)
    assert again.finished == 4
    assert len(asked) == 5
    assert asked[3] == asked[2]
    assert len({config.train.learning_rate for config in asked}) == 4
    again.run(4, killed, no_progress)
    assert len(asked) == 5
    with pytest.raises(UserError, match="another configuration or other ranges"):
        Study(tmp_path, CONFIG, [Range.parse("train.learning_rate=1e-4:1e-2")])


@NOTHING_DRAWN
def test_one_process_at_a_time_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    study = Study(tmp_path, CONFIG, [RATE])

    def fit(config: Config, report: Report) -> None:
        with pytest.raises(UserError, match="another process goes on with this study"):
            Study(tmp_path, CONFIG, [RATE]).run(1, train, no_progress)
        train(config, report)

    study.run(1, fit, no_progress)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "study.db").write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match="is not a study that can be gone on with: DatabaseError"):
        Study(tmp_path / "damaged", CONFIG, [RATE])


@NOTHING_DRAWN
def test_a_trial_below_the_median_is_ended_early(tmp_path: Path) -> None:
    reported: list[list[float]] = []

    def fit(config: Config, report: Report) -> None:
        reported.append([])
        scale = 1.0 if len(reported) <= BEFORE_PRUNING else 1e-3
        train(config, lambda value: (reported[-1].append(value), report(value))[0], scale)

    study = Study(tmp_path, CONFIG, [Range.parse("train.seed=1:1000")])
    study.run(BEFORE_PRUNING + 2, fit, no_progress)
    assert [len(values) for values in reported] == [2] * BEFORE_PRUNING + [1, 1]
    assert [row["state"] for row in study.rows()][-2:] == ["pruned", "pruned"]


@NOTHING_DRAWN
def test_fields_that_do_not_go_together_are_no_trial(tmp_path: Path) -> None:
    study = Study(tmp_path, CONFIG, [Range.parse("train.heads=2"), Range.parse("train.kv_heads=1,2,3")])
    ran: list[int] = []

    def fit(config: Config, report: Report) -> None:
        ran.append(config.train.kv_heads)
        train(config, report)

    study.run(6, fit, no_progress)
    assert 3 not in ran
    assert study.finished == 6


def diverge(config: Config) -> None:
    raise ConfigError("the loss of step 5 is nan: lower train.learning_rate")


def take_heads_that_do_not_divide_hidden(config: Config) -> None:
    retrievers.make_config(replace(config.train, model="sasrec", hidden=8, heads=3, kv_heads=3), ("item",))


@NOTHING_DRAWN
@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (diverge, "the loss of step 5 is nan: lower train.learning_rate"),
        (
            take_heads_that_do_not_divide_hidden,
            "train.hidden (8) must be a multiple of train.heads (3) for sasrec",
        ),
    ],
    ids=["diverging", "heads"],
)
def test_a_trial_that_cannot_be_trained_has_no_value_and_the_study_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fail: Callable[[Config], None], words: str
) -> None:
    asked: list[Config] = []

    def fit(config: Config, report: Report) -> None:
        asked.append(config)
        if len(asked) == 2:
            Path(config.train.out).mkdir()
            Path(f"{config.train.out}.training").mkdir()
            fail(config)
        train(config, report)

    study = Study(tmp_path, CONFIG, [RATE])
    study.run(4, fit, no_progress)
    assert (study.finished, len(asked)) == (4, 5)
    assert [row["state"] for row in study.rows()] == ["complete", "fail", "complete", "complete", "complete"]
    assert caplog.messages == [f"trial 1 failed: {words}"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [f"trial-{study.best()[2]}"]


@NOTHING_DRAWN
def test_a_cause_that_is_no_trials_own_ends_the_study_which_goes_on_without_it(tmp_path: Path) -> None:
    full = True

    def fit(config: Config, report: Report) -> None:
        if full:
            raise ConfigError("train.out: no space left on the device")
        train(config, report)

    with pytest.raises(ConfigError, match="no space left"):
        Study(tmp_path, CONFIG, [RATE]).run(2, fit, no_progress)
    full, study = False, Study(tmp_path, CONFIG, [RATE])
    study.run(2, fit, no_progress)
    assert [row["state"] for row in study.rows()] == ["fail"] * MOST_FAILED + ["complete"] * 2


@NOTHING_DRAWN
def test_a_line_of_metrics_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A trial was killed in the middle of its second line; the study goes on with that trial."""

    def killed(config: Config, report: Report) -> None:
        running = Path(f"{config.train.out}.training")
        running.mkdir()
        (running / "metrics.jsonl").write_text('{"step": 5, "recall@10": 0.5}\n{"step": 10, "reca')
        assert _validations(running) == [0.5]
        raise Killed

    with pytest.raises(Killed):
        Study(tmp_path, CONFIG, [RATE]).run(1, killed, no_progress)
    study = Study(tmp_path, CONFIG, [RATE])
    study.run(1, train, no_progress)
    assert study.finished == 1


def test_the_command_trains_and_its_best_file_is_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (
        "steps=4",
        "evaluate_every=2",
        "batch=32",
        "hidden=8",
        "layers=1",
        "heads=2",
        "kv_heads=2",
        "max_items=5",
    )
    command = [
        "tune", "--set=train.model=sasrec", "--set=train.out=given", "--set=server.api_key=secret",
        *(f"--set=train.{part}" for part in small),
        "--set=train.validation_examples=50", "--vary=train.learning_rate=1e-3,1e-2", f"--out={tmp_path}",
    ]  # fmt: skip
    assert run([*command, "--trials=1"]) == 0
    *_, model, anew = capsys.readouterr().out.splitlines()
    assert anew == f"train it anew: jgr train --config={tmp_path}/best.toml"
    (trial,) = (path for path in tmp_path.glob("trial-?") if path.is_dir())
    assert model == f"its model: {trial}, which jgr serve takes"
    found = load_config(tmp_path / "best.toml")
    assert found.train.out == "given"
    assert found.train.learning_rate in (1e-3, 1e-2)
    assert found.train.hidden == 8
    assert found.server.api_key == Config().server.api_key


def test_a_study_of_other_data_does_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Study(tmp_path, CONFIG, [RATE], "some")
    Study(tmp_path, CONFIG, [RATE], "some")
    with pytest.raises(
        UserError, match=r"holds a study of other data: the dataset of data\.path was made anew"
    ):
        Study(tmp_path, CONFIG, [RATE], "others")
    settings = ("train.model=sasrec", "train.evaluate_every=5")
    Study(tmp_path / "shop", override(Config(), *settings), [RATE], "others")
    command = ["tune", *(f"--set={setting}" for setting in settings), f"--out={tmp_path / 'shop'}"]
    assert run([*command, "--vary=train.learning_rate=1e-4:1e-2:log"]) == 2
    assert f"{tmp_path / 'shop'}: holds a study of other data" in capsys.readouterr().err


def test_the_digest_of_a_dataset_tells_all_that_is_learnt_and_validated_on() -> None:
    def made(last: int = 3, title: str = "a") -> str:
        catalog = Catalog.build(["a", "b", "c", "d"], [[1], [2], [3], [4]], [{"title": title}, {}, {}, {}])
        return Dataset(catalog, leave_one_out([[0, 1, 2, last], [3, 1, 0, 2]])).digest()

    assert made() == made()
    assert len({made(), made(last=1), made(title="b")}) == 3
