# SPDX-License-Identifier: Apache-2.0
"""README's table of measurements is what the result files give, and the tool that writes it touches nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sources import checked_out
from tools import quality_table
from tools.claims import listing
from tools.markdown import MarkerError, replace_table
from tools.quality_table import MODELS, OTHER_CHOICE
from tools.readme_table import (
    BEGIN,
    END,
    HEADLINES,
    ORDER_METRICS,
    QUALITY_BEGIN,
    QUALITY_END,
    WRITTEN,
    faults_table,
    load_results,
    misses,
    order_table,
    readme,
    table,
)

RESULT: dict[str, Any] = {
    "command": "python -m benchmarks.x",
    "measured_commit": "0123456789abcdef",
    "machine": {"cpu": "Some|CPU", "cores": 2},
    "claims": [
        {
            "id": "the-speed",
            "value": 4321.0,
            "unit": "requests/s",
            "better": "higher",
            "target": 4000,
            "holds": True,
        },
        {"id": "error", "value": 2.3e-05, "unit": "", "better": "lower", "target": 1e-05, "holds": False},
    ],
}


def test_readme_holds_what_the_result_files_give() -> None:
    for path, fill in WRITTEN:
        text = path.read_text()
        assert text == fill(text, load_results()), "run: python -m tools.readme_table"


def test_every_headline_is_a_claim() -> None:
    assert set(HEADLINES) <= {claim["id"] for result in load_results() for claim in result["claims"]}
    assert len(HEADLINES) <= 12
    assert len(table([RESULT], ["error"]).split("\n")) == 3


def test_a_stale_claim_is_marked() -> None:
    old = {**RESULT, "benchmark": "beam_attention", "sources": "of other code"}
    rows = table([old]).split("\n")[2:]
    assert [row.split(" | ")[4] for row in rows] == [r"Some\|CPU, 2 cores, 01234567, **stale**"] * 2
    assert "stale" in table([old], ["error"])
    fresh = {**old, "sources": checked_out().digest("benchmarks/beam_attention.py")}
    assert "stale" not in table([fresh])
    assert len(table([fresh], ["error"]).split("\n")) == 3
    assert "stale" in table([{**fresh, "dirty": True}])
    text = readme(f"{BEGIN}{END}{QUALITY_BEGIN}{QUALITY_END}", [old, fresh])
    assert "Of all 4 claims 2 are missed and 2 stale." in " ".join(text.split())


def test_stale_results_are_listed_with_the_cheapest_first() -> None:
    at = {**RESULT, "benchmark": "beam_attention", "measured_commit": "none", "sources": "", "rows": []}
    results = [
        {**at, "command": "b", "date": "2026-11-21T10:00:00+00:00"},
        {**at, "command": "c", "date": "2026-11-21T10:05:00+00:00"},
        {**at, "command": "a", "date": "2026-11-21T11:00:00+00:00", "seconds": 120},
        {
            **at,
            "command": "d",
            "date": "2026-11-22T10:00:00+00:00",
            "sources": checked_out().digest("benchmarks/beam_attention.py"),
        },
    ]
    first, _, *rest = listing(results)
    assert first == "3 of 4 results are stale, with 6 of 8 claims"
    assert [line.split() for line in rest] == [
        ["2", "2", "1", "a"],
        ["<=", "5", "2", "1", "c"],
        ["?", "2", "1", "b"],
    ]


def test_a_row_for_each_claim() -> None:
    where = r"Some\|CPU, 2 cores"
    assert table([RESULT, {**RESULT, "measured_commit": None, "claims": RESULT["claims"][:1]}]).split(
        "\n"
    ) == [
        "| what was measured | measured | better | target | machine, commit | command |",
        "|---|---|---|---|---|---|",
        rf"| the speed | 4,321 requests/s | higher | ≥ 4,000 | {where}, 01234567 | `python -m benchmarks.x` |",
        rf"| error | 2.3e-05 | lower | ≤ 1e-05, **missed** | {where}, 01234567 | `python -m benchmarks.x` |",
        rf"| the speed | 4,321 requests/s | higher | ≥ 4,000 | {where}, not committed | `python -m benchmarks.x` |",
    ]


def test_a_row_for_each_fault_and_why_one_has_not_run() -> None:
    counts = {"sent": 90, "lost": 0, "late": 3, "refused": 1, "wrong": 0, "missed_later": 2}
    rows = [
        {"fault": "one", "ran": True, **counts, "whole_s": 9.14},
        {"fault": "two", "ran": True, **counts, "whole_s": None, "seen": "it was asked first"},
        {"fault": "three", "ran": False, "why": "needs root"},
    ]
    results = [{"benchmark": "another", "rows": rows}, {"benchmark": "fleet_faults", "rows": rows}]
    assert faults_table(results).split("\n")[2:] == [
        "| one | 90 | 0 | 3 | 1 | 0 | 2 | 9.1 s |",
        "| two; it was asked first | 90 | 0 | 3 | 1 | 0 | 2 | never |",
        "| three | not run: needs root |  |  |  |  |  |  |",
    ]


def test_a_missed_target_is_told_with_its_figures_and_why() -> None:
    of = {"better": "lower", "target": 1.05, "unit": "x"}
    one = "regret-of-the-heuristic-on-held-out-shapes"
    claims = [{"id": one, "value": 1.06, "holds": False, **of}, {"id": "x", "value": 2, "holds": False, **of}]
    result = {**RESULT, "benchmark": "x"}
    held = {**result, "claims": [{"id": one, "value": 1.04, "holds": True, **of}]}
    found = misses([held, {**result, "claims": claims}])
    assert " ".join(found.split()).startswith(
        "- **Tiles of attention by rule** (`x`: 1.06 of ≤ 1.05). On the processor of an earlier result"
    )
    assert found.count("- **") == 1
    assert misses([held]) == ""


def test_a_claim_is_told_in_its_title_and_a_ratio_in_times() -> None:
    of = {"value": 1.49, "unit": "x", "better": "higher", "target": 1.6, "holds": False}
    known = "bat-over-re-on-the-best-workload-at-90-percent-skew"
    claims = [{"id": "some-words", "title": "Some | words", **of}, {"id": known, **of}]
    rows = table([{**RESULT, "claims": claims}]).split("\n")[2:]
    assert [row.split(" | ")[:4] for row in rows] == [
        [r"| Some \| words", "1.49 times", "higher", "≥ 1.6, **missed**"],
        [
            "| Requests per second of BAT over caching nothing, where it gains most; 90 % of accesses go to a tenth of "
            "the items",
            "1.49 times", "higher", "≥ 1.6, **missed**",
        ],
    ]  # fmt: skip


def test_two_rows_for_each_dataset_of_the_quality_benchmarks() -> None:
    def row(method: str, hr: float, ndcg: float, of: str = "beauty") -> dict[str, object]:
        return {"of": of, "method": method, "hr@10": hr, "ndcg@10": ndcg}

    scorer = [
        row("jgr", 0.3, 0.15, "hstu-counting-beauty"),
        row("jgr + sequential rules", 0.4, 0.25, "hstu-counting-beauty"),
    ]
    scorer.append({"of": "hstu-counting-beauty", "exclude_history": True})
    kept = [
        row("jgr", 0.2, 0.1, "hstu-counting-beauty-history-kept"),
        {"of": "hstu-counting-beauty-history-kept", "exclude_history": False},
    ]
    generator = [row("jgr", 0.1, 0.05), row("SASRec", 0.2, 0.1), {"of": "beauty", "exclude_history": True}]
    generator.append({"of": "beauty", "published": {"SASRec": [0.2392, 0.1259], "TIGER": [1.0, 0.5]}})
    rules = {
        **row("sequential rules", 0.25, 0.16),
        "exclude_history": True,
        "other_convention": {"hr@10": 0.15, "ndcg@10": 0.11},
    }
    digest = {
        name: checked_out().digest(f"benchmarks/{name}.py") for name in ("quality_rules", "quality_beauty")
    }
    results = [
        {**RESULT, "rows": [{"other": 1}]},
        {**RESULT, "benchmark": "bat_accuracy", "rows": [row("jgr", 0.9, 0.9)]},
        {**RESULT, "benchmark": "quality_counting_beauty", "sources": "other", "rows": [*scorer, *kept]},
        {**RESULT, "benchmark": "quality_beauty", "sources": digest["quality_beauty"], "rows": generator},
        {**RESULT, "benchmark": "quality_rules", "sources": digest["quality_rules"], "rows": [rules]},
    ]
    earlier = ["", "† measured on earlier code (`make claims`)."]
    assert quality_table.whole(results).split("\n") == [
        "| dataset | items of the history | sequential rules | sequence-kNN | item-kNN | SASRec, trained here | "
        "jgr: generator | jgr: scorer | jgr: scorer + rules | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| Amazon Beauty | left out | .2500 / .1600 |  |  | .2000 / .1000 | .1000 / .0500 | HSTU .3000 / .1500† | "
        "HSTU .4000 / .2500† | SASRec .2392 / .1259; TIGER 1.0000 / .5000 |",
        "| Amazon Beauty | allowed | .1500 / .1100 |  |  |  |  | HSTU .2000 / .1000† |  |  |",
        *earlier,
    ]
    assert quality_table.summary(results).split("\n") == [
        "| dataset | items of the history | sequential rules | best published | jgr: generator | jgr: scorer |",
        "|---|---|---|---|---|---|",
        "| Amazon Beauty | left out | .2500 / .1600 | TIGER 1.0000 / .5000 | .1000 / .0500 | HSTU .3000 / .1500† |",
        "",
        "Sequential rules, which only count, beat every model of jgr in HR@10 or NDCG@10 on: Amazon Beauty with "
        "the history's",
        "items left out; Amazon Beauty with the history's items allowed.",
        *earlier,
    ]
    results[-1]["rows"] = [{**rules, "exclude_history": False}]
    with pytest.raises(ValueError, match="beauty: the results do not agree"):
        quality_table.whole(results)


def test_every_quality_result_is_of_a_model_that_the_table_names() -> None:
    found = {
        row["of"]
        for result in load_results()
        if result["benchmark"].startswith("quality") and result["benchmark"] != "quality_kuairand"
        for row in result["rows"]
        if "exclude_history" in row
    }
    for end in OTHER_CHOICE:
        found = {name.removesuffix(end) for name in found}
    assert found <= MODELS.keys()


def test_a_row_for_each_way_of_ranking() -> None:
    figures = dict.fromkeys(ORDER_METRICS, 0.25) | {"recall@10": 1.0}
    found = [
        {"of": "some-set", "users": 9},
        {"of": "some-set", "method": "retriever", **figures},
        {"of": "some-set", "method": "both, item_prefix", **figures, "computed_tokens_share": 0.0707},
        {"of": "some-set", "method": "difference", **figures},
    ]
    results = [{**RESULT, "rows": found}, {**RESULT, "benchmark": "bat_accuracy", "rows": found}]
    assert quality_table.whole(results).count("some") == 0
    assert order_table(results).split("\n")[2:] == [
        "| some-set | retriever | .2500 | .2500 | .2500 | 1.0000 | .2500 | .2500 |  |",
        "| some-set | both, item_prefix | .2500 | .2500 | .2500 | 1.0000 | .2500 | .2500 | 7% |",
    ]


def test_only_the_part_between_the_markers_changes() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_table(text, "new", BEGIN, END) == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert replace_table(replace_table(text, "new", BEGIN, END), "new", BEGIN, END) == replace_table(
        text, "new", BEGIN, END
    )


@pytest.mark.parametrize(
    "text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{END}{END}", f"{BEGIN}{BEGIN}{END}"]
)
def test_missing_or_repeated_markers_are_refused(text: str) -> None:
    with pytest.raises(MarkerError, match="once each and in this order"):
        replace_table(text, "new", BEGIN, END)


def test_results_come_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.cpu", "a.h200", "a.cpu"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": name}))
    (tmp_path / "a.cpu.png").write_bytes(b"")
    assert [r["benchmark"] for r in load_results(tmp_path)] == ["a.cpu", "a.h200", "b.cpu"]
