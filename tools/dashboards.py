# SPDX-License-Identifier: Apache-2.0
"""Writes Grafana's dashboards and Prometheus's alert rules for a jgr server into deploy/.

    python -m tools.dashboards

What a panel says of a series is what jgr.serving.engine.metrics says of it. A test asks a Prometheus that scrapes live
servers for every expression, and fails when a series stands on no board, or when a file differs from what is written
here. `$model` chooses models; the series of a server with one model have no such label, which ".*" matches too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jgr.serving.engine.metrics import Metrics, documentation
from tools.dashboard_fleet import FLEET
from tools.dashboard_parts import (
    CACHED,
    TOKENS,
    TOTAL,
    WINDOW,
    Alert,
    Board,
    Panel,
    gauge,
    growth,
    mean,
    most,
    quantiles,
    rate,
    share,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
SERIES = re.compile(r"\b(?:jgr|process|python)_[a-z0-9_]+")
SUFFIXES = ("_total", "_bucket", "_sum", "_count")


BOARDS = (
    Board(
        "overview",
        "jgr: overview",
        (
            Panel(
                "Requests",
                "reqps",
                ((rate("jgr_requests_total", "endpoint, status", model=False), "{{endpoint}} {{status}}"),),
            ),
            Panel("Latency", "s", quantiles("jgr_stage_seconds", "kind", TOTAL, (0.5, 0.9, 0.99))),
            Panel("Refused by the queue", "reqps", ((rate("jgr_rejected_total", "reason"), "{{reason}}"),)),
            Panel(
                "Refused at the door",
                "reqps",
                ((rate("jgr_refused_total", "reason", model=False), "{{reason}}"),),
            ),
            Panel(
                "Late, left and broken",
                "reqps",
                (
                    (rate("jgr_deadline_expired_total"), "deadline expired"),
                    (rate("jgr_cancelled_total"), "client left"),
                    (rate("jgr_executor_failures_total"), "executor failures"),
                ),
            ),
            Panel(
                "Waiting and running",
                "short",
                (
                    (gauge("jgr_queue_depth"), "waiting requests"),
                    (gauge("jgr_in_flight"), "runs in flight"),
                ),
            ),
            Panel(
                "Device time",
                "percentunit",
                (
                    (rate("jgr_device_seconds_total"), "busy"),
                    (rate("jgr_wasted_device_seconds_total"), "of it for nobody"),
                ),
            ),
            Panel("Memory of the engine", "bytes", ((gauge("jgr_memory_bytes", "part"), "{{part}}"),)),
            Panel("Memory of the process", "bytes", (("process_resident_memory_bytes", "resident"),)),
            Panel(
                "Processor and files",
                "short",
                (
                    (f"rate(process_cpu_seconds_total[{WINDOW}])", "cores"),
                    ("process_open_fds", "open files"),
                ),
            ),
            Panel(
                "Models and catalogs",
                "short",
                (
                    ('sum by (model, version) (jgr_model_info{model=~"$model"})', "{{model}} {{version}}"),
                    ('sum by (model, version) (jgr_catalog_info{model=~"$model"})', "catalog {{version}}"),
                    (gauge("jgr_catalog_items"), "items"),
                ),
            ),
            Panel(
                "Changes",
                "short",
                (
                    (growth("jgr_model_reloads_total", "outcome"), "reload {{outcome}}"),
                    (growth("jgr_catalog_activations_total", "outcome"), "catalog {{outcome}}"),
                ),
            ),
        ),
    ),
    Board(
        "scheduling",
        "jgr: scheduling",
        (
            Panel("Stages, P99", "s", quantiles("jgr_stage_seconds", "stage", at=(0.99,))),
            Panel("Requests in a batch", "short", ((mean("jgr_batch_size", "kind"), "{{kind}}"),)),
            Panel(
                "Requests over rows of a batch",
                "percentunit",
                (
                    (
                        f"{rate('jgr_batch_size_sum', 'kind')} / {rate('jgr_batch_rows_total', 'kind')}",
                        "{{kind}}",
                    ),
                ),
            ),
            Panel(
                "Real over padded tokens",
                "percentunit",
                (
                    (
                        f"{rate('jgr_real_tokens_total', 'kind')} / {rate('jgr_padded_tokens_total', 'kind')}",
                        "{{kind}}",
                    ),
                ),
            ),
            Panel("Time left at the first plan", "s", quantiles("jgr_slack_seconds", at=(0.01, 0.5))),
            Panel(
                "Error of the forecast", "s", quantiles("jgr_forecast_error_seconds", at=(0.05, 0.5, 0.95))
            ),
            Panel(
                "Wasted device time",
                "percentunit",
                (
                    (
                        f"{rate('jgr_wasted_device_seconds_total')} / {rate('jgr_device_seconds_total')}",
                        "of device time",
                    ),
                ),
            ),
            Panel(
                "Programs compiled",
                "short",
                ((f"sum by (phase) (increase(jgr_compilations_total[{WINDOW}]))", "{{phase}}"),),
            ),
            Panel("Scorers: wait of a part", "s", quantiles("jgr_executor_wait_seconds")),
            Panel("Scorers: parts", "reqps", ((rate("jgr_parts_total", "size"), "size {{size}}"),)),
            Panel("Scorers: pairs", "short", ((rate("jgr_pairs_total", "of"), "{{of}}"),)),
            Panel(
                "Beams and items",
                "short",
                (
                    (rate("jgr_dead_beams_total"), "dead beams"),
                    (rate("jgr_unknown_items_total"), "unknown items of histories"),
                ),
            ),
            Panel(
                "Garbage collections",
                "short",
                (
                    (
                        f"sum by (generation) (rate(python_gc_collections_total[{WINDOW}]))",
                        "generation {{generation}}",
                    ),
                ),
            ),
        ),
    ),
    Board(
        "cache",
        "jgr: cache",
        (
            Panel(
                "Tokens read from the cache",
                "percentunit",
                ((share(TOKENS, CACHED), "of prompt tokens"),),
            ),
            Panel("Tokens", "short", ((rate(TOKENS, "source"), "{{source}}"),)),
            Panel("Layouts", "reqps", ((rate("jgr_layouts_total", "layout"), "{{layout}}"),)),
            Panel("Pages of the pool", "short", ((gauge("jgr_cache_pages", "holder"), "{{holder}}"),)),
            Panel("Entries", "short", ((gauge("jgr_cache_entries", "kind"), "{{kind}}"),)),
            Panel(
                "Fragmentation", "percentunit", (('jgr_cache_fragmentation{model=~"$model|"}', "{{kind}}"),)
            ),
            Panel("Events", "short", ((rate("jgr_cache_events_total", "event"), "{{event}}"),)),
            Panel(
                "Items read from other devices",
                "binBps",
                (
                    (f"{rate('jgr_device_item_bytes_total')} or vector(0)", "read"),
                    (f"{rate('jgr_device_sent_bytes_total')} or vector(0)", "sent, with padding"),
                ),
            ),
            Panel("Hints", "reqps", ((rate("jgr_hints_total", "outcome"), "{{outcome}}"),)),
            Panel(
                "Drift against no cache, P99",
                "none",
                (
                    *quantiles("jgr_shadow_drift", at=(0.99,)),
                    *(
                        (expression, f"{what} {legend}")
                        for what, of in (("in 8 bits", "quantize"), ("repaired", "repair"))
                        for expression, legend in quantiles(f"jgr_{of}_drift", at=(0.99,))
                    ),
                ),
            ),
            Panel(
                "Approximate answers against whole ones",
                "none",
                (
                    (most("jgr_repair_disorder"), "1 - Kendall's tau, of the last samples"),
                    (most("jgr_repair_fell_back"), "computed whole in place of that"),
                    *(
                        (expression, f"Kendall's tau {legend}")
                        for expression, legend in quantiles("jgr_repair_kendall_tau", at=(0.05, 0.5))
                    ),
                    (mean("jgr_repair_top10_overlap"), "overlap of the first ten"),
                    (mean("jgr_repair_kl"), "KL divergence"),
                ),
            ),
        ),
    ),
    Board(
        "embeddings",
        "jgr: embeddings",
        (
            Panel("Rows", "short", ((rate("jgr_embedding_rows_total", "event"), "{{event}}"),)),
            Panel(
                "Rows read from the device",
                "percentunit",
                ((share("jgr_embedding_rows_total", 'event="hits"'), "of rows"),),
            ),
            Panel(
                "Rows sent to the device", "Bps", ((rate("jgr_embedding_bytes_total", "table"), "{{table}}"),)
            ),
            Panel("Rows on the device", "short", ((gauge("jgr_embedding_resident", "table"), "{{table}}"),)),
            Panel("Pages for rows", "short", ((gauge("jgr_border_pages", "of"), "{{of}}"),)),
            Panel("Moves of the border", "ops", ((rate("jgr_border_moves_total", "of"), "{{of}}"),)),
        ),
    ),
    Board(
        "features",
        "jgr: features",
        (
            Panel("Records by state", "short", ((rate("jgr_features_total", "state"), "{{state}}"),)),
            Panel(
                "Fresh records",
                "percentunit",
                ((share("jgr_features_total", 'state="fresh"'), "of records"),),
            ),
            Panel("Events", "short", ((rate("jgr_feature_events_total", "event"), "{{event}}"),)),
            Panel("Items in the cache", "short", ((gauge("jgr_feature_entries"), "items"),)),
        ),
    ),
    FLEET,
)

ALERTS = (
    Alert(
        "JgrManyRefusals",
        "sum(rate(jgr_rejected_total[5m])) > 0.05 * "
        '(sum(rate(jgr_rejected_total[5m])) + sum(rate(jgr_stage_seconds_count{stage="total"}[5m])))',
        "5m",
        "warning",
        "More than 5 % of the requests are refused for want of time or room: the load is above the capacity.",
    ),
    Alert(
        "JgrDeadlineMisses",
        'sum(rate(jgr_deadline_expired_total[5m])) > 0.01 * sum(rate(jgr_stage_seconds_count{stage="total"}[5m]))',
        "5m",
        "warning",
        "More than 1 % of the accepted requests miss their deadline: forecasts are too low.",
    ),
    Alert(
        "JgrExecutorFailures",
        "sum(increase(jgr_executor_failures_total[5m])) > 0",
        "0m",
        "critical",
        "A run failed; the log has its traceback.",
    ),
    Alert(
        "JgrDrift",
        "histogram_quantile(0.99, sum by (le) (rate(jgr_shadow_drift_bucket[15m]))) > 1e-3",
        "15m",
        "critical",
        "Answers from the cache differ from those computed without it.",
    ),
    Alert(
        "JgrApproximationDrifts",
        "max(jgr_repair_fell_back) > 0",
        "0m",
        "warning",
        "Approximate answers drifted beyond cache.max_drift: prompts are computed whole, which takes longer.",
    ),
    Alert(
        "JgrCompilesForRequests",
        'sum(increase(jgr_compilations_total{phase="request"}[5m])) > 0',
        "0m",
        "warning",
        "A request had to wait for a program that was not compiled at the start.",
    ),
    Alert(
        "JgrReloadFailed",
        'sum(increase(jgr_model_reloads_total{outcome="failed"}[10m])) + '
        'sum(increase(jgr_catalog_activations_total{outcome="failed"}[10m])) > 0',
        "0m",
        "warning",
        "A reload or an activation failed; the old version goes on.",
    ),
    Alert(
        "JgrMemoryGrows",
        "deriv(process_resident_memory_bytes[6h]) * 86400 > 0.1 * process_resident_memory_bytes",
        "6h",
        "warning",
        "At this pace the process takes a tenth more memory every day.",
    ),
    Alert(
        "JgrFleetLosesAttempts",
        'sum(increase(jgr_fleet_attempts_total{outcome="lost"}[5m])) > 0',
        "0m",
        "warning",
        "A replica died with requests; they were sent to others.",
    ),
    Alert(
        "JgrFleetSilentReplica",
        "max by (replica) (jgr_fleet_report_age_seconds) > 10",
        "1m",
        "warning",
        "A replica that serves has not reported for long: requests are routed without knowing what it holds and does.",
    ),
    Alert(
        "JgrFleetVersionsDiffer",
        'count by (model) (count by (model, version) (jgr_model_info{replica!=""})) > 1',
        "30m",
        "warning",
        "Replicas serve different versions of a model for longer than a rollout should take; /v1/models says which.",
    ),
    Alert("JgrDown", 'up{job="jgr"} == 0', "1m", "critical", "The server does not answer."),
)


def families(expression: str) -> Iterator[str]:
    """The families whose series an expression reads."""
    known = documentation()
    for name in SERIES.findall(expression):
        stem = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
        yield stem if stem in known else name


def described(panel: Panel) -> str:
    known = documentation()
    names = dict.fromkeys(name for expression, _ in panel.queries for name in families(expression))
    return "\n".join(f"{name}: {known[name]}" for name in names)


def dashboard(board: Board) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": f"jgr-{board.name}",
        "title": board.title,
        "tags": ["jgr"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "model",
                    "type": "query",
                    "label": "Model",
                    "datasource": SOURCE,
                    "query": "label_values(jgr_model_info, model)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [graph(number, panel) for number, panel in enumerate(board.panels)],
    }


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def graph(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": described(panel),
        "datasource": SOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0 if panel.unit != "none" else None},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "datasource": SOURCE}
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


def rules() -> str:
    """The alert rules as Prometheus reads them. JSON is YAML."""
    found = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    return json.dumps({"groups": [{"name": "jgr", "rules": found}]}, indent=1) + "\n"


def files() -> Mapping[Path, str]:
    """The text of each file, by its path below deploy/."""
    boards = {
        Path("grafana/dashboards") / f"{board.name}.json": json.dumps(dashboard(board), indent=1) + "\n"
        for board in BOARDS
    }
    return {**boards, Path("prometheus/alerts.yml"): rules()}


def shown() -> set[str]:
    """The families that stand on some board."""
    return {
        name
        for board in BOARDS
        for p in board.panels
        for expression, _ in p.queries
        for name in families(expression)
    }


if __name__ == "__main__":
    Metrics()
    for path, text in files().items():
        target = DEPLOY / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        print(target.relative_to(ROOT))
