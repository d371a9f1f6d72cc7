# SPDX-License-Identifier: Apache-2.0
"""The table that an evaluation prints: a model's metrics beside those of the baselines on the same examples.

The one idea: whatever is compared is a ranking of every example, [n, m] rows by name. So a further baseline is one
more array, and every interval is paired: all rows are resampled together (jgr.evaluation.bootstrap).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import Examples, Interactions
from jgr.evaluation import bootstrap
from jgr.evaluation.baselines import RULES_DECAY, RULES_WINDOW, ItemKNN, Popularity, SequentialRules
from jgr.evaluation.metrics import METRICS as KINDS
from jgr.evaluation.metrics import Hits, mean_all, per_query
from jgr.evaluation.sequence_knn import SequenceKNN
from jgr.evaluation.tables import Rows, aligned, parts

Int32 = npt.NDArray[np.int32]
Rankings = Mapping[str, Int32]
Row = dict[str, float]
Bounds = dict[str, tuple[float, float]]

METRICS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "mrr@10")
TOP_K = 10
MARKOV, RULES, SEQUENCE_KNN = "Markov chain", "sequential rules", "sequence-kNN"
BASELINES = ("popularity", "item-kNN", MARKOV, RULES, SEQUENCE_KNN)
"""The rows of a table that are counted, in its order."""


@dataclass(frozen=True)
class Difference:
    """The model's mean minus a baseline's, with its interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Values by row name and metric.

    intervals: of `rows`, and differences: to the model, by baseline; both empty without resamples.
    """

    rows: dict[str, Row]
    intervals: dict[str, Bounds]
    differences: dict[str, dict[str, Difference]]


def metric_names(ks: Sequence[int]) -> tuple[str, ...]:
    """Every metric at every k: "recall@5", "hr@5", ..."""
    return tuple(f"{kind}@{k}" for k in ks for kind in KINDS)


def score(ranked: Int32, examples: Examples) -> Row:
    """Mean of each of METRICS over examples; ranked: [n, TOP_K] rows, best first, -1 where there is none."""
    return mean_all(Hits.of_targets(ranked, examples.targets), METRICS)


def rank_baselines(
    interactions: Interactions,
    examples: Examples,
    n_items: int,
    exclude_history: bool,
    top_k: int,
    *,
    rules_window: int = RULES_WINDOW,
    rules_decay: float = RULES_DECAY,
) -> dict[str, Int32]:
    """The rankings of all baselines, learnt from the training sequences: [n, top_k] rows each."""
    learnt = interactions.sequences
    fitted: dict[str, Popularity | ItemKNN | SequentialRules | SequenceKNN] = {
        "popularity": Popularity(learnt, n_items),
        "item-kNN": ItemKNN(learnt, n_items),
        MARKOV: SequentialRules(learnt, n_items, window=1),  # of first order: what follows the last item
        RULES: SequentialRules(learnt, n_items, rules_window, rules_decay),
        SEQUENCE_KNN: SequenceKNN(learnt, n_items),
    }
    return {
        name: baseline.top_k(examples.histories, top_k, exclude_seen=exclude_history)
        for name, baseline in fitted.items()
    }


def rank_trained(
    folders: Sequence[str], item_ids: Sequence[str], examples: Examples, exclude_history: bool, top_k: int
) -> dict[str, Int32]:
    """The rankings of trained retrievers, by name; several are told apart by their folders, as they were given.

    Raises UserError for a folder that holds none, or one of other items.
    """
    from jgr.models import retrievers

    found = {}
    for text in folders:
        cfg, params = retrievers.load_for(Path(text), item_ids)
        name = retrievers.retriever(cfg).NAME
        if len(folders) > 1:
            name = f"{name} {text}"
        found[name] = retrievers.top_k(
            params, cfg, examples.histories, top_k,
            exclude_seen=exclude_history, asked=examples.target_times,
        )  # fmt: skip
    return found


def score_baselines(
    interactions: Interactions, examples: Examples, n_items: int, exclude_history: bool
) -> dict[str, Row]:
    """METRICS of all baselines."""
    ranked = rank_baselines(interactions, examples, n_items, exclude_history, TOP_K)
    return {name: score(rows, examples) for name, rows in ranked.items()}


def compare(
    rankings: Rankings,
    examples: Examples,
    ks: Sequence[int],
    *,
    model: str | None = None,
    resamples: int = 0,
    seed: int = 0,
) -> Comparison:
    """Every metric at every k of every ranking, n >= 1 examples. model: the row that the others are compared with."""
    metrics = metric_names(ks)
    scored = {name: per_query(Hits.of_targets(r, examples.targets), metrics) for name, r in rankings.items()}
    rows = {name: {m: float(of[m].mean()) for m in metrics} for name, of in scored.items()}
    if not resamples:
        return Comparison(rows, {}, {})
    columns = np.stack([of[m] for of in scored.values() for m in metrics], axis=1)
    drawn = bootstrap.resampled_means(columns, resamples, seed).reshape(resamples, len(scored), len(metrics))
    means = dict(zip(scored, drawn.transpose(1, 0, 2), strict=True))  # by name: [r, metrics]
    intervals = {
        name: dict(zip(metrics, zip(low.tolist(), high.tolist(), strict=True), strict=True))
        for name, (low, high) in ((name, bootstrap.interval(of)) for name, of in means.items())
    }
    differences = {} if model is None else _differences(rows, means, model)
    return Comparison(rows, intervals, differences)


def _differences(
    rows: Mapping[str, Row], means: Mapping[str, npt.NDArray[np.float64]], model: str
) -> dict[str, dict[str, Difference]]:
    """means: by name, [r, metrics] of the same resamples."""
    found = {}
    for name in rows:
        if name == model:
            continue
        low, high = bootstrap.interval(means[model] - means[name])
        found[name] = {
            m: Difference(rows[model][m] - rows[name][m], float(low[i]), float(high[i]))
            for i, m in enumerate(rows[name])
        }
    return found


def format_table(rows: Mapping[str, Mapping[str, float]], metrics: Sequence[str] = METRICS) -> str:
    """Aligned text: a line for each row name, a column for each metric, to four places."""
    return _aligned(
        [["", *metrics]]
        + [[name, *(f"{of[m]:.4f}" if m in of else "" for m in metrics)] for name, of in rows.items()]
    )


def convention(exclude_history: bool) -> str:
    """The words that head a table: what is done with the items of the history."""
    return "the history's items " + ("are left out" if exclude_history else "may be recommended")


def format_comparison(
    found: Comparison, ks: Sequence[int], model: str | None = None, width: int | None = None
) -> str:
    """A block for each k; below it, where there are intervals, the differences to the model. width: characters of a
    line, as of a terminal: what has more comes in several blocks of as many metrics as fit; None: any length."""
    blocks: list[str] = []
    for k in ks:
        metrics = metric_names([k])
        lines = [["", *metrics]]
        for name, row in found.rows.items():
            bounds = found.intervals.get(name, {})
            lines.append([name, *(_cell(row[m], bounds.get(m)) for m in metrics)])
        for name, of in found.differences.items():
            cells = (_cell(of[m].mean, (of[m].low, of[m].high), "+") for m in metrics)
            lines.append([f"{model} - {name}", *cells])
        blocks += map(_aligned, parts(lines, width))
    return "\n\n".join(blocks)


def format_sweep(field: str, points: Sequence[Mapping[str, Any]], k: int) -> str:
    """A line for each point of a sweep's JSON."""
    metrics = (f"hr@{k}", f"ndcg@{k}")
    lines = [[field, "p50 ms", "p99 ms", "requests/s", *metrics]]
    for point in points:
        latency, bounds = point["latency_ms"], point["intervals"]
        timed = [f"{latency['p50']:.2f}", f"{latency['p99']:.2f}", f"{point['requests_per_s']:.1f}"]
        lines.append([point["value"], *timed, *(_cell(point["metrics"][m], bounds.get(m)) for m in metrics)])
    return _aligned(lines)


def _cell(value: float, bounds: tuple[float, float] | None, sign: str = "") -> str:
    interval = f" [{bounds[0]:{sign}.4f}, {bounds[1]:{sign}.4f}]" if bounds else ""
    return f"{value:{sign}.4f}{interval}"


def _aligned(rows: Rows) -> str:
    return "\n".join(aligned(rows))
