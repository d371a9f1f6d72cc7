# SPDX-License-Identifier: Apache-2.0
"""The recheck of a quality row: it agrees with jgr.evaluation, asks as it should, and finds what is wrong."""

from __future__ import annotations

import ast
import gzip
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.evaluation.metrics import Hits, mean_all
from tools import recheck

LINES = ["u1 5 6 7 8", "u2 6 5 9", "u3 8 9 5 6 7"]


class Handler(BaseHTTPRequestHandler):
    """Answers with the items 9, 8, 7, ... but for those of the history, where they are left out."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        info = {"id": "scorer", "max_beam_width": 0, "max_history": 2}
        self._send({"data": [{"id": "other", "max_beam_width": 8, "max_history": 1}, info]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({"path": self.path, **body})
        seen = body["history"] if body["exclude_history"] else ()
        items = [str(i) for i in range(9, 4, -1) if str(i) not in seen]
        self._send({"items": [{"item_id": item} for item in items]})

    def _send(self, found: Any) -> None:
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_asks_counts_and_finds_a_wrong_figure(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, answers, result = tmp_path / "sequences.txt.gz", tmp_path / "answers", tmp_path / "result.json"
    raw.write_bytes(gzip.compress("\n".join(LINES).encode()))
    assert recheck.main(["ask", url, "--model=scorer", f"--raw={raw}", f"--answers={answers}"]) == 0
    by_history = {tuple(body["history"]): body for body in Handler.asked}
    assert by_history.keys() == {("6", "7"), ("6", "5"), ("5", "6")}  # cut to max_history
    assert {(body["path"], body["candidates"]) for body in Handler.asked} == {("/v1/rank", "all")}
    # Targets 8, 9, 7 stand at 2, 1, 3.
    told = {"hr@5": 1.0, "hr@10": 1.0, "mrr@10": (1 / 2 + 1 + 1 / 3) / 3}
    told["ndcg@5"] = told["ndcg@10"] = (1 / np.log2(3) + 1 + 1 / 2) / 3
    result.write_text(json.dumps({"rows": [{"of": "it", "method": "jgr", **told}]}))
    count = ["count", f"--raw={raw}", f"--answers={answers}", f"--result={result}", "--of=it"]
    capsys.readouterr()
    assert recheck.main(count) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == pytest.approx({"examples": 3, **told})
    told["mrr@10"] += 0.001
    result.write_text(json.dumps({"rows": [{"of": "it", "method": "jgr", **told}]}))
    assert recheck.main(count) == 1
    assert "mrr@10" in capsys.readouterr().out


def test_the_history_is_left_out_and_told_whole(url: str, tmp_path: Path) -> None:
    raw, answers = tmp_path / "sequences.txt", tmp_path / "answers"
    raw.write_text(LINES[0])
    asked = ["ask", url, "--model=scorer", f"--raw={raw}", f"--answers={answers}", "--exclude_history"]
    assert recheck.main(asked) == 0
    assert Handler.asked[0]["history"] == ["5", "6", "7"]
    assert recheck.place(answers.read_text(), "8") == 2
    assert recheck.place(answers.read_text(), "7") == 0


def test_columns_of_minionerec(tmp_path: Path) -> None:
    raw = tmp_path / "test.inter"
    raw.write_text("user_id:token\titem_id_list:token_seq\titem_id:token\nu\t3 4\t5\nv\t6\t7\n")
    assert recheck.examples(raw) == [(["3", "4"], "5"), (["6"], "7")]


def test_figures_are_those_of_the_evaluation() -> None:
    rng = np.random.default_rng(0)
    ranked = np.array([rng.permutation(30)[:10] for _ in range(40)], np.int32)
    targets = rng.integers(0, 30, 40).astype(np.int32)
    answers = [json.dumps({"items": [{"item_id": str(row)} for row in rows]}) for rows in ranked]
    found = recheck.figures([recheck.place(a, str(t)) for a, t in zip(answers, targets, strict=True)])
    assert found == pytest.approx(mean_all(Hits.of_targets(ranked, targets), list(found)))
    with pytest.raises(ValueError, match="twice"):
        recheck.place(json.dumps({"items": [{"item_id": "1"}] * 2}), "1")


def test_it_imports_the_standard_library_alone() -> None:
    tree = ast.parse(Path(recheck.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {str(module).partition(".")[0] for module in modules} <= sys.stdlib_module_names
