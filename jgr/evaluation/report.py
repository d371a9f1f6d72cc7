# SPDX-License-Identifier: Apache-2.0
"""The table that an evaluation prints: a model's metrics beside those of the baselines on the same examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import Examples, Interactions
from jgr.evaluation.baselines import ItemKNN, Popularity
from jgr.evaluation.metrics import Hits, mean_all

METRICS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "mrr@10")
TOP_K = 10


def score(ranked: npt.NDArray[np.int32], examples: Examples) -> dict[str, float]:
    """Mean of each of METRICS over examples; ranked: [n, TOP_K] rows, best first, -1 where there is none."""
    return mean_all(Hits.of_targets(ranked, examples.targets), METRICS)


def score_baselines(
    interactions: Interactions, examples: Examples, n_items: int, exclude_history: bool
) -> dict[str, dict[str, float]]:
    """Popularity and item-kNN, learnt from the training sequences."""
    fitted: dict[str, Popularity | ItemKNN] = {
        "popularity": Popularity(interactions.sequences, n_items),
        "item-kNN": ItemKNN(interactions.sequences, n_items),
    }
    return {
        name: score(baseline.top_k(examples.histories, TOP_K, exclude_seen=exclude_history), examples)
        for name, baseline in fitted.items()
    }


def format_table(rows: Mapping[str, Mapping[str, float]], metrics: Sequence[str] = METRICS) -> str:
    """Aligned text: a line for each row name, a column for each metric, to four places."""
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{metric:>10}" for metric in metrics)]
    for name, values in rows.items():
        cells = "".join(f"{values[m]:>10.4f}" if m in values else f"{'':>10}" for m in metrics)
        lines.append(f"{name:<{width}}{cells}")
    return "\n".join(lines)
