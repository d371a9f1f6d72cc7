# SPDX-License-Identifier: Apache-2.0
"""The files of /ui over HTTP: types, headers, no way out of their folder, who may have them. What they do is tested in
pages/.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jgr.serving.http.ui_page import PATHS, POLICY
from tests.serving.fakes import LiveServer

FOLDER = Path(__file__).resolve().parents[3] / "jgr/serving/http/ui"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|\beval\b|new Function"
)
KEPT = re.compile(
    r"localStorage|sessionStorage|indexedDB|document\.cookie|console\.|history\.(push|replace)State"
)


def test_every_file_is_served_with_its_type_and_headers(server: LiveServer) -> None:
    assert set(PATHS) == {"/ui", *(f"/ui/{name}" for name in NAMES if name != "index.html")}
    for name in NAMES:
        reply = server.call("/ui" if name == "index.html" else f"/ui/{name}")
        assert (reply.status, reply.body) == (200, (FOLDER / name).read_bytes()), name
        assert reply.headers["content-type"] == f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        assert reply.headers["content-security-policy"] == POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cache-control"] == "no-cache"


def test_the_policy_allows_this_server_alone_and_nothing_in_the_page() -> None:
    rules = dict(rule.partition(" ")[::2] for rule in POLICY.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {rules.pop(name) for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert rules == {
        "img-src": "data:",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_the_sources_make_no_markup_of_text_and_keep_nothing() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text()
        assert "SPDX-License-Identifier: Apache-2.0" in text, name
        assert not MARKUP.search(text) and not KEPT.search(text), name
        assert [
            url for url in re.findall(r"https?://[^\s\"'`]+", text) if url != "http://www.w3.org/2000/svg"
        ] == []
        for module in re.findall(r'from "(.+?)"', text):
            assert module.startswith("./") and module[2:] in NAMES, (name, module)
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", page)
    assert sorted(re.findall(r'(?:src|href)="([^"]+)"', page)) == ["data:,", "ui/app.js", "ui/style.css"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/",
        "/ui//app.js",
        "/ui/app.js/",
        "/ui/APP.JS",
        "/ui/index.html",
        "/ui/nothing.js",
        "/ui/../docs_page.py",
        "/ui/../../../config.py",
        "/ui/%2e%2e/docs_page.py",
        "/ui/..%2fdocs_page.py",
        "/ui/%2fetc/passwd",
        "/ui/app.js%00.css",
        "/ui/..\\docs_page.py",
    ],
)
def test_nothing_else_is_served(server: LiveServer, path: str) -> None:
    assert server.call(path).status == 404


def test_the_page_is_only_read(server: LiveServer) -> None:
    assert server.call("/ui", b"", method="POST").status == 405
    assert server.call("/", b"", method="POST").status == 405
    assert server.call("/").headers["location"] == "/ui"
    head = server.call("/ui/app.js", method="HEAD")
    assert (head.status, head.body) == (200, b"")


def test_the_page_may_be_open_while_the_api_is_not_below_any_path() -> None:
    with LiveServer("server.api_key=s3cret", "server.open_ui=true", "server.base_path=/shop/jgr") as server:
        for path in ("/", "/shop/jgr", "/shop/jgr/"):
            reply = server.call(path)
            assert (reply.status, reply.headers["location"], reply.body) == (302, "/shop/jgr/ui", b"")
        for path in PATHS:
            assert server.call(f"/shop/jgr{path}").status == server.call(path).status == 200
        for path in ("/v1/models", "/v1/items", "/metrics", "/docs", "/ui/../v1/models", "/ui/nothing.js"):
            assert server.call(path).status == 401, path
