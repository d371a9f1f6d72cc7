# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alert rules: what is committed is what the tool writes, and a Prometheus that scrapes live servers
finds figures for every panel."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from jgr.serving.cluster.relay import Answered
from jgr.serving.cluster.series import Series
from jgr.serving.cluster.whole import metrics
from jgr.serving.engine.metrics import documentation
from tests.debian import PROMETHEUS, PROMTOOL
from tests.serving.scorer_fakes import HSTU, ScorerServer
from tests.serving.scorers.test_executors import ITEMS, engine, fill, toy  # noqa: F401
from tests.serving.scorers.test_paging import PAGED, asked, folder_of, settings
from tests.serving.versions.test_shared_memory import Two
from tools import dashboards, reference_pages
from tools.dashboards import ALERTS, BOARDS, DEPLOY, WINDOW

PATIENCE_S = 60.0
MEASURED_S = "5s"


def test_the_files_are_what_the_tool_writes() -> None:
    for path, text in dashboards.files().items():
        assert (DEPLOY / path).read_text() == text, "run python -m tools.dashboards"


def test_every_series_of_ours_stands_on_a_board_with_its_text() -> None:
    ours = {name for name in documentation() if name.startswith("jgr_")}
    assert ours <= dashboards.shown()
    assert dashboards.shown() <= documentation().keys()
    panels = [panel for board in BOARDS for panel in dashboards.dashboard(board)["panels"]]
    assert all(panel["description"] for panel in panels)
    places = [
        (board.name, *panel["gridPos"].values())
        for board in BOARDS
        for panel in dashboards.dashboard(board)["panels"]
    ]
    assert len(set(places)) == len(places)


def test_every_mean_has_a_sum_to_divide() -> None:
    """The client library leaves `_sum` out where values may be negative."""
    queries = " ".join(
        expression for board in BOARDS for panel in board.panels for expression, _ in panel.queries
    )
    sums = set(re.findall(r"(\w+)_sum\b", queries))
    assert "jgr_batch_size" in sums
    assert sums.isdisjoint(re.findall(r"\w+", reference_pages.without_sum()))


@contextmanager
def prometheus(folder: Path, ports: list[int]) -> Iterator[int]:
    """Debian's Prometheus over servers on these ports, with our alert rules: its own port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"job_name": "jgr", "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=log,
        )  # fmt: skip
    try:
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def ask(port: int, path: str) -> Any:
    """What Prometheus answers; None while it does not listen yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (ConnectionError, json.JSONDecodeError):
        return None
    finally:
        connection.close()


def figures(port: int, expression: str) -> list[float]:
    """The numbers of an expression, those that are none left out."""
    chosen = expression.replace(WINDOW, MEASURED_S).replace("$model", ".*")
    answer = ask(port, "/api/v1/query?" + urlencode({"query": chosen}))
    if answer is None:
        return []
    assert answer["status"] == "success", f"{chosen}: {answer}"
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in values if math.isfinite(value)]


@contextmanager
def fleet_of(replica: int) -> Iterator[int]:
    """A front's /metrics over one replica, the server on that port, to which it routes whenever it is asked."""
    series = Series("front")
    series.become(["r"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", replica, timeout=PATIENCE_S)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read()
            connection.close()
            series.heard("r")
            series.decided(1e-4)
            series.routed("r", "joint")
            series.flies("r", 7.0)
            series.ended("answered")
            body = metrics({"r": Answered(200, [], text)}, [series.text()]).body
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.usefixtures("toy")
@pytest.mark.prometheus
def test_no_panel_is_empty_over_live_servers(tmp_path: Path) -> None:
    rank = {
        "model": "jgr",
        "history": ["i1", "i2"],
        "candidates": ["i3", "i4", "i5"],
        "user_id": "u",
        "deadline_ms": 30_000,
    }
    two = Two(tmp_path, "cache.shadow=1")
    store = tmp_path / "features.sqlite"
    fill(str(store))
    try:
        in_pages = settings(folder_of(tmp_path / "hstu", HSTU), *PAGED)
        with ScorerServer(*engine(str(store))) as scorer, ScorerServer(in_pages) as paged:
            ports = [int(url.rpartition(":")[2]) for url in (two.listener.url, scorer.url, paged.url)]
            with fleet_of(ports[0]) as front, prometheus(tmp_path, [*ports, front]) as port:

                def traffic() -> None:
                    two.call("/v1/rank", rank)
                    two.call("/v1/recommend", {"model": "jgr", "history": ["i1"], "top_k": 2})
                    scorer.rank(
                        history=["B001"], context={"slot0": 1}, candidates=ITEMS[:35], deadline_ms=30_000
                    )
                    paged.rank(**asked(HSTU, 3))

                empty = [(board.title, panel.title) for board in BOARDS for panel in board.panels]
                until_s = time.monotonic() + PATIENCE_S
                while empty and time.monotonic() < until_s:
                    traffic()
                    empty = [
                        (board.title, panel.title)
                        for board in BOARDS
                        for panel in board.panels
                        if (board.title, panel.title) in empty
                        and not any(figures(port, expression) for expression, _ in panel.queries)
                    ]
                assert not empty
                rules = ask(port, "/api/v1/rules")["data"]["groups"][0]["rules"]
                assert [rule["name"] for rule in rules] == [alert.name for alert in ALERTS]
                assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
                alerting = [rule["name"] for rule in rules if rule["state"] != "inactive"]
                assert set(alerting) <= {"JgrMemoryGrows"}, (
                    "this one watches seconds of a start here, and pends"
                )
    finally:
        two.stop()


@pytest.mark.prometheus
@pytest.mark.parametrize(("refused", "fires"), [(4, False), (6, True)])
def test_refusals_alert_whatever_endpoint_was_asked(tmp_path: Path, refused: int, fires: bool) -> None:
    """Of 100 requests a second that come by gRPC alone, some are refused."""
    answered = 'jgr_stage_seconds_count{kind="rank", stage="total"}'
    grpc = 'jgr_requests_total{endpoint="/inference.GRPCInferenceService/ModelInfer", status="200"}'
    alert = next(alert for alert in ALERTS if alert.name == "JgrManyRefusals")
    expected = [{"exp_labels": {"severity": "warning"}, "exp_annotations": {"summary": alert.summary}}]
    case = {
        "interval": "1s",
        "input_series": [
            {"series": 'jgr_rejected_total{reason="too_late"}', "values": f"0+{refused}x1200"},
            {"series": answered, "values": f"0+{100 - refused}x1200"},
            {"series": grpc, "values": "0+100x1200"},
        ],
        "alert_rule_test": [
            {"eval_time": "15m", "alertname": alert.name, "exp_alerts": expected if fires else []}
        ],
    }
    suite = {"rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")], "tests": [case]}
    (tmp_path / "suite.yml").write_text(json.dumps(suite))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", tmp_path / "suite.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_the_alert_rules_are_rules() -> None:
    done = subprocess.run(
        [PROMTOOL, "check", "rules", DEPLOY / "prometheus" / "alerts.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
