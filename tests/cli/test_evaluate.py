# SPDX-License-Identifier: Apache-2.0
"""`jgr evaluate` on a small model: through an engine and over HTTP it is the same table, and a mistake is one line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.cli import console
from jgr.cli.evaluate import Options, _check_lengths, evaluate
from jgr.client.remote import Client
from jgr.config import Config, UserError, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.evaluation.baselines import SequentialRules
from jgr.evaluation.client import RemoteServer
from jgr.evaluation.fusion import reciprocal_rank_fusion
from jgr.evaluation.metrics import Hits, mean_all
from jgr.evaluation.recommendations import LocalEngine
from jgr.evaluation.report import BASELINES, RULES, compare, rank_trained
from jgr.evaluation.served import Query
from jgr.models import retrievers
from jgr.serving.decoders.loading import load_engine
from jgr.training.retriever import train_retriever
from tests.serving.certificates import make_pems, tls
from tests.serving.decoders.test_model_server import Served
from tests.serving.scorer_fakes import CATALOG, HSTU
from tests.serving.scorer_fakes import make_folder as make_scorer
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
ONE_PROFILE = ("profiles.batch=4", "profiles.tokens=32", "profiles.widths=4,8", "profiles.candidates=1")
OPTIONS = Options(ks=(1, 5), resamples=50, requests=5)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, N_ITEMS, rng.integers(4, 12)) for _ in range(30)]
    return Dataset(make_catalog(), leave_one_out(sequences))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Asked by https, below a base path."""
    folder = tmp_path_factory.mktemp("model")
    pems = make_pems(folder)
    config = override(
        make_folder(folder / "tiny", layers=1), *ONE_PROFILE, *tls(pems), "server.base_path=/shop"
    )
    served = Served(config, ca_file=pems["authority"])
    yield served
    assert served.stop() == 0


def run(served: Served, dataset: Dataset, **options: Any) -> tuple[list[str], dict[str, Any]]:
    asked = {**vars(OPTIONS), "ca_file": served.ca_file, **options}
    lines, report = evaluate(served.config, dataset, Options(**asked))
    json.dumps(report)
    return lines, report


def test_an_engine_and_a_server_give_the_same_numbers(
    served: Served, dataset: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(console, "TELL_EVERY_S", 0.0)
    with caplog.at_level("INFO", "jgr"):
        lines, local = run(served, dataset, exclude_history=True)
    told = [text for text in caplog.messages if text.startswith(("compiling: ", "evaluating: "))]
    compiled = [text for text in told if text.startswith("compiling: ")]
    assert told[: len(compiled)] == compiled and f" of {len(compiled) - 1}" in compiled[-1]
    remote_lines, remote = run(served, dataset, exclude_history=True, url=served.url)
    assert (local.pop("through"), remote.pop("through")) == ("engine", served.url)
    assert local == remote
    assert lines == remote_lines
    assert list(local["rows"]) == [*BASELINES, "tiny"]
    assert list(local["differences"]) == list(BASELINES)
    assert (local["examples"], local["returned"], local["beam_width"]) == (30, 150, 8)
    low, high = local["intervals"]["tiny"]["hr@5"]
    assert low <= local["rows"]["tiny"]["hr@5"] <= high


def test_both_conventions_and_a_fusion_with_rules(served: Served, dataset: Dataset) -> None:
    asked = {"ks": (5,), "resamples": 20, "url": served.url}
    lines, both = run(served, dataset, both_conventions=True, fuse_depth=8, **asked)
    _, kept = run(served, dataset, **asked)
    _, left_out = run(served, dataset, exclude_history=True, **asked)
    other = both["other_convention"]
    assert (both["exclude_history"], other["exclude_history"]) == (False, True)
    for name in (*BASELINES, "tiny"):
        assert both["rows"][name] == kept["rows"][name]
        assert other["rows"][name] == left_out["rows"][name]
    assert lines[0] == "the history's items may be recommended:"
    assert "the history's items are left out:" in lines
    test = dataset.interactions.test
    rules = SequentialRules(dataset.interactions.sequences, N_ITEMS)
    with Client(served.url, ca_file=served.ca_file) as client:
        ranked = RemoteServer(client, dataset.catalog).recommend_all(test, Query(8, 8))
    fused = reciprocal_rank_fusion([ranked, rules.top_k(test.histories, 8, exclude_seen=False)], 5)
    assert both["rows"]["tiny + sequential rules"]["hr@5"] == pytest.approx(
        mean_all(Hits.of_targets(fused, test.targets), ["hr@5"])["hr@5"]
    )
    assert both["fusion"]["differences"].keys() == {"tiny", RULES}
    with pytest.raises(UserError, match="--fuse_depth"):
        Options(fuse_depth=8, sweep="beam.width=4,8")


@pytest.fixture(scope="module")
def engine(served: Served, dataset: Dataset) -> Iterator[LocalEngine]:
    with LocalEngine(load_engine(served.config, kinds=["recommend"]), dataset.catalog, 30.0) as engine:
        yield engine


def test_items_of_one_semantic_id_stand_in_catalog_order(engine: LocalEngine, dataset: Dataset) -> None:
    leaf_of_row = PrefixTree.build(dataset.catalog.codes).leaf_of_row
    ranked = engine.recommend_all(dataset.interactions.test, Query(8, 8))
    shared = 0
    for rows in ranked:
        leaves = leaf_of_row[rows]
        for leaf in set(leaves.tolist()):
            (places,) = np.nonzero(leaves == leaf)
            assert places.tolist() == list(range(places[0], places[0] + len(places)))
            assert rows[places].tolist() == sorted(rows[places])
            shared += len(places) > 1
    assert shared > 0


def test_a_sweep_of_beam_widths_over_http_and_here(served: Served, dataset: Dataset, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    lines, local = run(served, dataset, sweep="beam.width=4,8", plot=str(picture), limit=9)
    _, remote = run(served, dataset, sweep="beam.width=4,8", url=served.url, limit=9)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in lines[0].splitlines()] == ["beam.width", "4", "8"]
    assert (local["sweep"], local["examples"], local["in_flight"]) == ("beam.width", 9, 32)
    for here, there in zip(local["points"], remote["points"], strict=True):
        assert here["latency_ms"].keys() == there["latency_ms"].keys() == {"p50", "p90", "p99", "max"}
        for name in ("value", "beam_width", "metrics", "intervals"):
            assert here[name] == there[name]
    assert [point["beam_width"] for point in local["points"]] == [4, 8]
    with pytest.raises(UserError, match="server's largest beam width is 8, not 9"):
        run(served, dataset, sweep="beam.width=9", url=served.url)


def test_each_width_of_a_sweep_is_a_search_of_that_width(
    served: Served, engine: LocalEngine, dataset: Dataset
) -> None:
    _, report = run(served, dataset, sweep="beam.width=4,8", url=served.url)
    examples = dataset.interactions.test
    for point in report["points"]:
        width = point["beam_width"]
        ranked = engine.recommend_all(examples, Query(min(5, width), width))
        assert point["metrics"] == compare({"it": ranked}, examples, (1, 5)).rows["it"]


@pytest.mark.slow
def test_without_the_catalog(served: Served, dataset: Dataset) -> None:
    lines, report = run(served, dataset, unconstrained=True, limit=3, resamples=0)
    assert list(report["rows"])[-1] == "tiny without the catalog"
    free, bound = report["invalid"]["unconstrained"], report["invalid"]["constrained"]
    assert free["invalid"] > 0
    assert (bound["sequences"], bound["invalid"]) == (3 * 8, 0)
    assert lines[-1].startswith("no item of the catalog, constrained: 0 of 24 beams (0.00%)")
    assert report["intervals"] == {}


def test_the_limit_may_exceed_the_data(served: Served, dataset: Dataset) -> None:
    _, report = run(served, dataset, url=served.url, split="valid", limit=1000)
    assert (report["examples"], report["split"]) == (30, "valid")


def test_what_does_not_fit_is_refused(served: Served, dataset: Dataset) -> None:
    nobody = Dataset(dataset.catalog, leave_one_out([[0, 1], [2]]))
    with pytest.raises(UserError, match="the dataset has no valid examples"):
        run(served, nobody, split="valid")
    with pytest.raises(UserError, match=r"--k: 9 needs a beam\.width of at least that; it is 8"):
        run(served, dataset, ks=(9,), url=served.url)
    with pytest.raises(UserError, match=r"--plot: .*nowhere is not a folder"):
        run(served, dataset, sweep="beam.width=4", plot="/nowhere/curve.png")
    ids = dataset.catalog.item_ids[::-1]
    other = Catalog.build(ids, [("<a>",) if i else ("<b>",) for i in range(len(ids))], [{}] * len(ids))
    for url, owner in ((None, "model"), (served.url, "server")):
        with pytest.raises(
            UserError, match=f"the {owner}'s catalog is {dataset.catalog.version}, the dataset's"
        ):
            run(served, Dataset(other, dataset.interactions), url=url)
    named = override(served.config, "model.name=popularity")
    with pytest.raises(UserError, match="'popularity' is the name of a baseline"):
        evaluate(named, dataset, Options(ks=(1,), limit=1))
    with pytest.raises(UserError, match=r"--fuse_depth: 9 needs a beam\.width of at least that; it is 8"):
        run(served, dataset, fuse_depth=9)


def test_a_model_without_beams_has_no_curve_and_no_other_search(tmp_path: Path) -> None:
    config = make_scorer(tmp_path / "hstu", replace(HSTU, bias="positions"))
    dataset = Dataset(CATALOG, leave_one_out([[0, 1, 2, 3], [3, 2, 1, 0]]))
    with pytest.raises(UserError, match=f"--unconstrained: {tmp_path / 'hstu'} only ranks: it generates no"):
        evaluate(config, dataset, replace(OPTIONS, unconstrained=True))
    with pytest.raises(UserError, match="--sweep: tiny only ranks: it has no beams and no curve"):
        evaluate(config, dataset, replace(OPTIONS, sweep="beam.width=4,8"))


def test_validation_targets_that_were_learnt_are_not_measured(
    served: Served, dataset: Dataset, tmp_path: Path
) -> None:
    folder = str(tmp_path / "sasrec")
    config = override(
        Config(), f"train.out={folder}", "train.model=sasrec", "train.steps=1", "train.batch=4", "train.hidden=16",
        "train.learn_valid=true",
    )  # fmt: skip
    train_retriever(config, dataset)
    words = (
        f"{folder} has learnt the validation targets (train.learn_valid), so its figures would be too high"
    )
    for flag, asked, options in (
        ("--split", override(config, f"model.path={folder}"), OPTIONS),
        ("--baseline", served.config, replace(OPTIONS, baseline=(folder,))),
    ):
        with pytest.raises(UserError, match=re.escape(f"{flag}: {words}: give --split=test")):
            evaluate(asked, dataset, replace(options, split="valid"))
    _, report = run(served, dataset, url=served.url, baseline=(folder,), limit=3, resamples=0)
    assert "SASRec" in report["rows"]


def test_the_model_that_answered_is_named(served: Served, dataset: Dataset) -> None:
    other = override(served.config, "model.name=other")
    _, report = evaluate(
        other, dataset, Options(ks=(1,), limit=3, resamples=0, url=served.url, ca_file=served.ca_file)
    )
    assert report["model"] == served.config.model.name
    assert served.config.model.name in report["rows"] and "other" not in report["rows"]


def test_histories_that_cannot_be_told_whole_are_refused_before_one_is_asked() -> None:
    test, left_out = leave_one_out([[0, 1, 2, 3], [0, 1, 2]]).test, replace(OPTIONS, exclude_history=True)
    _check_lengths(test, 3, [left_out])
    _check_lengths(test, 2, [OPTIONS])
    with pytest.raises(
        UserError, match=r"a history has 3 items, more than server\.max_history \(2\): set it to 3"
    ):
        _check_lengths(test, 2, [OPTIONS, left_out])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sweep=beam.width=8", "--unconstrained"], "--sweep and --unconstrained are two measurements"),
        (["--plot=x.png"], "--plot draws the curve of a --sweep"),
        (["--unconstrained", "--url=http://localhost:1"], "leave out --url"),
        (["--k=0,5"], "--k must be integers from 1 to 1000, such as 1,5,10, not '0,5'"),
        (["--k="], "--k must be integers"),
        (["--requests=9"], "--requests has no effect here: it is for --sweep"),
        (["--feedback", "--k=5"], "--k has no effect here: it is for lists of items"),
        (["--feedback", "--rules_window=2"], "--rules_window has no effect here: it is for the table"),
        (
            ["--sweep=beam.width=8", "--rules_decay=2"],
            "--rules_decay has no effect here: it is for the table",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_one_line(options: list[str], words: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "evaluate", *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jgr: ") and done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"baseline": ("a",), "sweep": "beam.width=8"}, "--baseline .* leave out --sweep and --feedback"),
        ({"baseline": ("a",), "feedback": True}, "--baseline .* leave out --sweep and --feedback"),
        ({"exclude_history": True, "feedback": True}, "--feedback .* leave out --exclude_history"),
    ],
)
def test_what_has_no_place_in_a_sweep_or_in_feedback_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Options(**options)


def test_a_trained_baseline_has_a_row(
    served: Served, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "sasrec")
    config = override(
        Config(), f"train.out={folder}", "train.model=sasrec", "train.steps=3", "train.batch=4", "train.hidden=16"
    )  # fmt: skip
    train_retriever(config, dataset)
    _, report = run(served, dataset, baseline=(folder,))
    test, (cfg, weights) = dataset.interactions.test, retrievers.load(Path(folder))
    ranked = retrievers.top_k(weights, cfg, test.histories, 5, exclude_seen=False)
    assert report["rows"]["SASRec"]["hr@5"] == pytest.approx(
        np.mean((ranked == test.targets[:, None]).any(axis=1))
    )
    assert list(report["differences"]) == [*BASELINES, "SASRec"]
    again = tmp_path / "other" / "sasrec"
    shutil.copytree(folder, again)
    named = rank_trained((folder, str(again)), dataset.catalog.item_ids, test, False, 5)
    assert list(named) == [f"SASRec {folder}", f"SASRec {again}"]

    ids = [f"other{i}" for i in range(N_ITEMS)]
    with pytest.raises(UserError, match="was trained on other items"):
        rank_trained((folder,), ids, test, False, 5)

    def unreached(*_: Any) -> None:
        pytest.fail("the model is served before the baselines are known to fit")

    monkeypatch.setattr("jgr.cli.evaluate._serve", unreached)
    with pytest.raises(UserError, match="is not the config of a retriever"):
        run(served, dataset, baseline=(str(tmp_path),))
    for name in ("popularity", "SASRec"):
        with pytest.raises(UserError, match=f"model.name: '{name}' is the name of a baseline"):
            evaluate(
                override(served.config, f"model.name={name}"), dataset, replace(OPTIONS, baseline=(folder,))
            )
