# SPDX-License-Identifier: Apache-2.0
"""`jgr profile --costs` on a tiny decoder and a tiny scorer: the file predicts, and the report says how well."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import msgspec

from jgr.catalog.catalog import save_catalog
from jgr.cli.profile import table
from jgr.evaluation.profiling import Operation, Summary
from jgr.models import params, scorers
from jgr.models.retrievers import items_digest
from jgr.models.sasrec import SasrecConfig
from jgr.serving.policies.costs import CostModel
from tests.serving import tiny_model
from tests.serving.scorer_fakes import CATALOG, ITEMS, N_ITEMS

RUN = "import sys; from jgr.cli.main import run; sys.exit(run(['profile', *sys.argv[1:]]))"


def profile(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)


def test_sources_are_cut_to_the_terminal_or_left_out() -> None:
    source = "search/prefill/attention/transpose_and_reshape"
    operation = Operation("a_fusion_with_a_name_of_some_length", "prefill/attention", source, 20, 2e6)
    summary = Summary((operation,), {"prefill/attention": 2e6}, 1e6, 4e6)

    def last(width: int | None) -> str:
        lines = table(summary, 10, 5, width).splitlines()
        assert width is None or max(map(len, lines)) <= width
        return lines[-1].rstrip()

    assert last(None).endswith("  100.0%  prefill/attention/transpose_and_reshape")
    assert last(100).endswith("  100.0%  prefill/attention/transp")
    assert last(80).endswith(" 20      0.200  100.0%")


def costs(folder: Path, out: Path, *settings: str) -> tuple[CostModel, dict[str, Any], str]:
    """The model in the file, the report, and what was printed before it."""
    given = [
        f"--set={setting}" for setting in ("model.compilation_cache=", f"model.path={folder}", *settings)
    ]
    done = profile(*given, f"--costs={out}")
    assert done.returncode == 0, done.stderr
    table, _, report = done.stdout.rstrip().rpartition("\n")
    return CostModel.from_json(out.read_bytes()), json.loads(report), table


def check(model: CostModel, report: dict[str, Any], table: str, kinds: set[str]) -> None:
    assert set(model.kinds) == set(model.hosts) == set(report["kinds"]) == kinds
    assert model.to_json() == msgspec.json.encode(
        {name: report[name] for name in msgspec.structs.asdict(model)}
    )
    assert model.device == jax.default_backend() and 0 <= report["spread"]
    for kind, fitted in model.kinds.items():
        own = [point for point in report["points"] if point["kind"] == kind]
        assert fitted.points == len(own) and fitted.held_out is not None
        assert f"{fitted.held_out.mean:.1%}" in table
        for point in own:
            assert 0 < point["host_s"] <= point["seconds"] * 1.5 and point["label"] in table
        errors = [abs(model.seconds(kind, x["cost"]) - x["seconds"]) / x["seconds"] for x in own]
        assert abs(sum(errors) / len(errors) - fitted.errors.mean) < 1e-9


def test_a_decoders_costs(tmp_path: Path) -> None:
    tiny_model.make_folder(tmp_path / "tiny", layers=1, depth=2)  # six programs are compiled
    settings = [setting for setting in tiny_model.SETTINGS if not setting.startswith(("profiles", "beam"))]
    settings += [
        "profiles.batch=1",
        "profiles.tokens=32",
        "profiles.widths=2",
        "profiles.candidates=1",
        "beam.width=2",
    ]
    model, report, table = costs(tmp_path / "tiny", tmp_path / "costs.json", *settings)
    check(model, report, table, {"recommend", "rank"})
    assert model.family == "qwen3" == report["family"]
    labels = {point["label"] for point in report["points"] if point["kind"] == "recommend"}
    assert labels == {f"1x{tokens} width {width}" for tokens in (16, 32) for width in (1, 2)}


def test_a_scorers_costs(tmp_path: Path) -> None:
    cfg = SasrecConfig(N_ITEMS, 4, 8, 1, 2, 8, items_digest(ITEMS))
    drawn = params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))
    folder = tmp_path / "sasrec"
    scorers.save(folder, cfg, drawn, lambda into: save_catalog(CATALOG, into / "catalog.jsonl"))
    model, report, table = costs(folder, tmp_path / "costs.json", "executors.sizes=1")
    check(model, report, table, {"user", "part", "whole"})
    assert model.family == "sasrec"
    assert sum(point["kind"] == "user" for point in report["points"]) == 4

    refused = profile(f"--set=model.path={folder}", f"--costs={tmp_path / 'none' / 'costs.json'}")
    assert refused.returncode == 2 and "none is no folder" in refused.stderr
    refused = profile(f"--set=model.path={folder}")
    assert refused.returncode == 2 and "jgr profile traces decoders" in refused.stderr
