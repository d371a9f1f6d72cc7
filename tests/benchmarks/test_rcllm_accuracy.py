# SPDX-License-Identifier: Apache-2.0
"""The accuracy of reuse beyond the prefix: its table by hand, and the whole of it end to end on a tiny ranker."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import rcllm_accuracy
from benchmarks.rcllm_accuracy import (
    CANDIDATES,
    METRICS,
    RESAMPLES,
    Asked,
    Ranked,
    Task,
    claims,
    compare,
    means_over_users,
    row_of,
    token_layers,
)
from benchmarks.titles import title
from jgr.catalog.catalog import Catalog
from jgr.config import Config, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.data.preparation.prepare import train_title_tokenizer
from jgr.evaluation.metrics import Hits, per_query
from jgr.training.ranker_training import train_ranker


def test_a_dataset_counts_only_where_context_matters_and_the_retriever_is_beaten() -> None:
    """The target stands at a place that is drawn for each user; a method is how far it moves it to the front."""
    rng = np.random.default_rng(0)
    places = rng.integers(8, 20, 400)
    rows = np.tile(np.arange(20, dtype=np.int32), (400, 1))

    def table(forward: dict[str, int]) -> list[dict[str, object]]:
        found, values = {}, {}
        for name, by in forward.items():
            at = np.maximum(0, places - by)
            best = np.stack([np.insert(np.delete(np.arange(20), 0), n, 0) for n in at]).astype(np.int32)
            found[name] = Ranked(best, -np.argsort(best, axis=1).astype(float))
            values[name] = per_query(Hits.of_targets(best, rows[:, 0]), METRICS)
        return compare("ml1m", values, found, np.arange(400, dtype=np.int32), 4)

    good = {
        "retriever": 0,
        "full": 9,
        "prefix": 9,
        "naive": 4,
        "epic 3": 5,
        "cacheblend 0.30": 6,
        "rcllm 0.3": 8,
    }
    told = table(good)
    assert told[-1]["counts"]
    full = row_of(told, "full")
    at = np.maximum(0, places - 9)
    assert full["hr@1"] == pytest.approx(np.mean(at == 0), abs=1e-4)
    assert full["mrr@20"] == pytest.approx(np.mean(1 / (1 + at)), abs=1e-4)
    assert full["ndcg@10"] == pytest.approx(np.mean(np.where(at < 10, 1 / np.log2(2 + at), 0)), abs=1e-4)
    assert (full["of_full_ndcg@10"], full["kendall_tau"], full["kl"]) == (1, 1, 0)
    low, high = row_of(told, "rcllm 0.3")["of_full_interval"]
    assert low < row_of(told, "rcllm 0.3")["of_full_ndcg@10"] < high < 1
    every = claims("ml1m", told)
    assert [claim.id for claim in every] == [
        "rcllm-prefix-cache-keeps-of-full-ml1m",
        "rcllm-keeps-of-full-ndcg10-items-ml1m",
        "rcllm-ndcg10-less-epic-ml1m",
        "rcllm-ndcg10-less-cacheblend-ml1m",
    ]
    assert all(title(claim.to_json()) for claim in every) and every[2].value > 0
    for worse in ({"naive": 9}, {"retriever": 9}):
        told = table(good | worse)
        assert not told[-1]["counts"] and len(claims("ml1m", told)) == 1


def test_users_are_drawn_whole() -> None:
    """Of two users one has all hits, in nine requests: a resample has the one, the other, or both."""
    users, hits = np.repeat([7, 3], [9, 1]).astype(np.int32), np.repeat([1.0, 0.0], [9, 1])[:, None]
    found, counts = np.unique(means_over_users(hits, users), return_counts=True)
    assert found.tolist() == [0, 0.9, 1] and counts / RESAMPLES == pytest.approx([0.25, 0.5, 0.25], abs=0.04)


def test_token_layers_of_a_plan() -> None:
    """Of 10 tokens and 4 layers with 4 tokens computed: 16, and 10 + 12 where the first layer is computed whole."""
    assert token_layers("rcllm 0.3", 0.6, 4) == pytest.approx(16 / 40)
    assert token_layers("cacheblend 0.18", 0.6, 4) == pytest.approx(22 / 40)


@pytest.mark.slow
def test_every_method_ranks_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, n = np.random.default_rng(1), 40
    words = ["red", "blue", "shoe", "lamp", "old", "new", "long", "pipe"]
    names = [str(row) for row in range(n)]
    metadata = [{"title": " ".join(rng.choice(words, rng.integers(4, 7)))} for _ in names]
    catalog = Catalog.build(names, [[f"<a_{row}>"] for row in range(n)], metadata)
    lines = [json.dumps({"item_id": x, "metadata": y}) for x, y in zip(names, metadata, strict=True)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines) + "\n")
    train_title_tokenizer(tmp_path / "items.jsonl", 300, tmp_path / "title_tokenizer.json")
    dataset = Dataset(catalog, leave_one_out([rng.permutation(n)[:7].tolist() for _ in range(12)]))
    config = override(
        Config(), "train.model=ranker", "train.layouts=causal", f"train.out={tmp_path}/ranker",
        f"model.path={tmp_path}/ranker", f"model.compilation_cache={tmp_path}/xla", "data.kind=prepared",
        f"data.path={tmp_path}", "prompt.template=<bos>{history}", "prompt.item={title}{sid}", "prompt.max_items=4",
        "prompt.review_tokens=12", "rank.method=list_letter", "rank.item={title}{sid}", "rank.item_span=7",
        "rank.instruction=<sid>{last}", "rank.requests=1", "rank.tokens=384", "rank.context=256",
        "rank.candidates=20", "cache.device_mb=8", "beam.width=1", "profiles.batch=1", "profiles.tokens=96",
        "profiles.widths=1", "profiles.candidates=1", "train.negatives=19", "train.max_items=4", "train.batch=8",
        "train.steps=1", "train.hidden=32", "train.layers=2", "train.mlp=32", "batching.max_tokens=384",
    )  # fmt: skip
    train_ranker(config, dataset)
    monkeypatch.setattr(rcllm_accuracy, "RESAMPLES", 50)
    examples = dataset.interactions.test
    others = [
        np.append(rng.choice(np.setdiff1d(np.arange(n), target), CANDIDATES - 1, replace=False), target)
        for target in examples.targets
    ]
    rows = np.array(others, np.int32)
    test = Asked("test", examples, rows, len(rows)).some(6)
    valid = Asked("valid", examples, np.roll(rows, 1, axis=1), len(rows)).some(2)
    task = Task("industrial", config, dataset, (test, valid))
    claimed, table = rcllm_accuracy.measure_one(task, tmp_path, (), tmp_path / "kept")
    methods = {row["method"]: row for row in table if "method" in row}
    assert {name.split()[0] for name in methods} == {
        "retriever", "full", "prefix", "naive", "epic", "cacheblend", "rcllm",
    }  # fmt: skip
    assert methods["prefix"]["kendall_tau"] == methods["full"]["kendall_tau"] == 1
    assert claimed[0].value == 1 and methods["prefix"]["approximate_share"] == 0
    names = "rcllm 0.5", "rcllm 0.3", "rcllm 0.3, last token", "rcllm 0.1", "rcllm 0", "naive"
    shares = [methods[name]["approximate_share"] for name in names]
    assert 0 < shares[0] and all(fewer < more for fewer, more in itertools.pairwise(shares)), shares
    same = methods["rcllm 0.3, first token"]["approximate_share"]
    assert same == shares[2]
    assert methods["rcllm 0.3/0.3"]["approximate_share"] > shares[1], (
        "the history's titles come from the library"
    )
    assert table[0]["measured"] == 8 and table[0]["splits"]["valid"]["measured"] == 2
    assert table[0]["asked_before"] == []

    def never(*of: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(rcllm_accuracy, "rank_all", never)
    for name in ("later", "last"):
        (tmp_path / name).mkdir()
    again, same = rcllm_accuracy.measure_one(task, tmp_path / "later", (), tmp_path / "kept")
    assert again == claimed and same[1:] == table[1:] and "full" in same[0]["asked_before"]
    with pytest.raises(AssertionError, match="asked again"):
        rcllm_accuracy.measure_one(task._replace(asked=(test,)), tmp_path / "last", (), tmp_path / "kept")
    verdict = table[-1]
    assert set(verdict["rcllm_less"]) == {name for name in methods if name.startswith(("epic", "cache"))}
