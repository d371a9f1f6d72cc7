# SPDX-License-Identifier: Apache-2.0
"""Tables of recommendation quality, written from the results of benchmarks/quality_*.py by tools/readme_table.py.

`whole` has every model in both conventions of the history's items, for docs/benchmarks.md; `summary` has the best of
each kind in the convention of what others have published, for README.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tools import markdown
from tools.claims import stale

RULES, OURS = "sequential rules", "jgr"
FUSION = f"{OURS} + {RULES}"
COUNTING = (RULES, "sequence-kNN", "item-kNN")
PUBLISHED = "published"
GENERATOR, SCORER = "generator", "scorer"
EARLIER = "†"
"""Behind a figure of the quality table that is stale."""


class Model(NamedTuple):
    """What the rows of a quality result are of. kind: GENERATOR or SCORER. name: empty where the kind says it."""

    data: str
    kind: str
    name: str = ""


MODELS: Mapping[str, Model] = {
    "beauty": Model("Amazon Beauty", GENERATOR),
    "beauty-given-ids": Model("Amazon Beauty", GENERATOR, "published ids"),
    "hstu-counting-beauty": Model("Amazon Beauty", SCORER, "HSTU"),
    "informed-beauty": Model("Amazon Beauty", SCORER, "HSTU with texts"),
    "informed-beauty_repeats": Model("Amazon Beauty", SCORER, "HSTU with texts and weights for the history"),
    "industrial": Model("Amazon Industrial", GENERATOR),
    "hstu-industrial": Model("Amazon Industrial", SCORER, "HSTU, tuned"),
    "hstu-counting-industrial": Model("Amazon Industrial", SCORER, "HSTU"),
    "informed-industrial": Model("Amazon Industrial", SCORER, "HSTU with texts"),
    "informed-industrial_repeats": Model(
        "Amazon Industrial", SCORER, "HSTU with texts and weights for the history"
    ),
    "beauty-own-code": Model("Amazon Beauty", GENERATOR, "a code for each item, with texts"),
    "beauty-text": Model("Amazon Beauty", GENERATOR, "with texts"),
    "industrial-own-code": Model("Amazon Industrial", GENERATOR, "a code for each item, with texts"),
    "industrial-text": Model("Amazon Industrial", GENERATOR, "with texts"),
    "sports-own-code": Model("Amazon Sports", GENERATOR, "a code for each item, with texts"),
    "hstu-counting-sports": Model("Amazon Sports", SCORER, "HSTU"),
    "informed-sports": Model("Amazon Sports", SCORER, "HSTU with texts"),
    "informed-sports_repeats": Model("Amazon Sports", SCORER, "HSTU with texts and weights for the history"),
    "informed-sports_near": Model("Amazon Sports", SCORER, "HSTU with texts and co-occurrence"),
    "hstu-counting-instruments": Model("Amazon Instruments", SCORER, "HSTU"),
    "hstu-counting-instruments_repeats": Model(
        "Amazon Instruments", SCORER, "HSTU with weights for the history"
    ),
    "ml1m": Model("MovieLens 1M", GENERATOR),
    "hstu-ml1m": Model("MovieLens 1M", SCORER, "HSTU"),
    "hstu-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU"),
    "hstu-wide-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU, wide"),
    "hstu-large-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU-large"),
    "hstu-large-long-ml1m-whole": Model("MovieLens 1M, all movies", SCORER, "HSTU-large, trained longer"),
    "hstu-ml1m-half": Model("MovieLens 1M, users with times", SCORER, "HSTU"),
    "hstu-ml1m-half-times": Model("MovieLens 1M, users with times", SCORER, "HSTU with times"),
}
"""What the names in quality results stand for."""
OTHER_CHOICE = ("-history-kept", "-history-left-out")


Result = Mapping[str, Any]
At = tuple[str, bool]
"""A dataset, and whether the history's items are left out."""


class Figure(NamedTuple):
    """What a method reaches. pair: HR@10 and NDCG@10. old: whether it was measured on other code than this."""

    pair: tuple[float, float]
    old: bool

    def __str__(self) -> str:
        text = " / ".join(f"{figure:.4f}".removeprefix("0") for figure in self.pair)
        return text + (EARLIER if self.old else "")


Cells = dict[At, dict[str, dict[str, Figure]]]
"""Figures by dataset and convention, by column, by whose they are: "" where the column says it."""


def whole(results: Sequence[Result]) -> str:
    """HR@10 / NDCG@10 of every quality result: two rows for each dataset, with the history's items left out and not.

    Counting, SASRec as we train it, jgr's generators and scorers, the fusion of a scorer with rules, and what others
    have published with the same choice.
    """
    shown = (*COUNTING, "SASRec", GENERATOR, SCORER, FUSION, PUBLISHED)
    words = {"SASRec": "SASRec, trained here", GENERATOR: "jgr: generator", SCORER: "jgr: scorer"}
    words[FUSION] = "jgr: scorer + rules"
    rows = [("dataset", "items of the history", *(words.get(column, column) for column in shown))]
    cells = gathered(results)
    for at in _order(cells):
        told = ("; ".join(_named(who, of) for who, of in cells[at].get(c, {}).items()) for c in shown)
        rows.append((*_where(at), *told))
    return "\n\n".join([markdown.table(rows), *_notes("\n".join(map(str, rows)))])


def summary(results: Sequence[Result]) -> str:
    """The best of each kind by HR@10, a row for each dataset, in the convention of what others have published.

    Below the table stands where rules that only count are better than every model, in either convention.
    """
    shown = {RULES: RULES, PUBLISHED: "best published", GENERATOR: "jgr: generator", SCORER: "jgr: scorer"}
    rows = [("dataset", "items of the history", *shown.values())]
    cells = gathered(results)
    for at in _order(cells):
        other = cells.get((at[0], not at[1]), {})
        if PUBLISHED in cells[at] or (PUBLISHED not in other and at[1]):
            rows.append((*_where(at), *(_best(cells[at].get(column, {})) for column in shown)))
    below = [
        f"{data} with the history's items {choice}"
        for data, choice in map(_where, _order(cells, _below_rules))
    ]
    noted = f"Sequential rules, which only count, beat every model of jgr in HR@10 or NDCG@10 on: {'; '.join(below)}."
    notes = [textwrap.fill(noted, 120)] if below else []
    return "\n\n".join([markdown.table(rows), *notes, *_notes("\n".join(map(str, rows)))])


def gathered(results: Sequence[Result]) -> Cells:
    """All figures of the quality results; of two of the same, that of today's code. Raises ValueError where results do
    not agree about a convention."""
    cells: Cells = {}

    def add(at: At, column: str, name: str, pair: Sequence[float], old: bool) -> None:
        known = cells.setdefault(at, {}).setdefault(column, {})
        if name not in known or known[name].old:
            known[name] = Figure((pair[0], pair[1]), old)

    quality = [result for result in results if str(result.get("benchmark")).startswith("quality")]
    chosen = _conventions(quality)
    for result in quality:
        old = stale(result)
        for row in result["rows"]:
            name = str(row.get("of"))
            for end in OTHER_CHOICE:
                name = name.removesuffix(end)
            if name not in MODELS or row["of"] not in chosen:
                continue
            model, at = MODELS[name], (MODELS[name].data, chosen[row["of"]])
            for who, pair in row.get("published", {}).items():
                add(at, PUBLISHED, who, pair, False)
            if "hr@10" not in row:
                continue
            column = {OURS: model.kind}.get(row["method"], row["method"])
            if column in (model.kind, FUSION):
                add(at, column, model.name, (row["hr@10"], row["ndcg@10"]), old)
            elif column in (*COUNTING, "SASRec"):
                add(at, column, "", (row["hr@10"], row["ndcg@10"]), old)
            if "other_convention" in row and column in COUNTING:
                other = row["other_convention"]
                add((at[0], not at[1]), column, "", (other["hr@10"], other["ndcg@10"]), old)
    return cells


def _conventions(results: Sequence[Result]) -> dict[str, bool]:
    """Whether the history's items are left out, by what the rows are of."""
    chosen: dict[str, bool] = {}
    for row in (row for result in results for row in result["rows"]):
        if "of" in row and "exclude_history" in row:
            if chosen.setdefault(row["of"], row["exclude_history"]) != row["exclude_history"]:
                raise ValueError(
                    f"{row['of']}: the results do not agree whether the history's items are left out"
                )
    return chosen


def _below_rules(columns: Mapping[str, Mapping[str, Figure]]) -> bool:
    """Whether rules are above every model in one of the two metrics."""
    models = [found.pair for kind in (GENERATOR, SCORER) for found in columns.get(kind, {}).values()]
    rules = [found.pair for found in columns.get(RULES, {}).values()]
    return bool(models and rules) and any(rules[0][i] > max(pair[i] for pair in models) for i in (0, 1))


def _order(cells: Cells, wanted: Callable[[Mapping[str, Mapping[str, Figure]]], bool] = bool) -> list[At]:
    return sorted((at for at in cells if wanted(cells[at])), key=lambda at: (at[0], not at[1]))


def _where(at: At) -> tuple[str, str]:
    return at[0], "left out" if at[1] else "allowed"


def _named(who: str, figure: Figure) -> str:
    return f"{who} {figure}".strip()


def _best(figures: Mapping[str, Figure]) -> str:
    """The one with the highest HR@10; empty where there is none."""
    return _named(*max(figures.items(), key=lambda one: one[1].pair)) if figures else ""


def _notes(text: str) -> list[str]:
    return [f"{EARLIER} measured on earlier code (`make claims`)."] if EARLIER in text else []
