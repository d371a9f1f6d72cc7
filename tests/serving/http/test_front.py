# SPDX-License-Identifier: Apache-2.0
"""What stands before the application: TLS, CORS, a base path, what is open without a key, and the page at /docs."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jgr.config import ConfigError, UserError
from jgr.config.serving import OWN_PATHS
from jgr.serving.http import ui_page
from jgr.serving.http.docs_page import PATHS, POLICY
from jgr.serving.http.front import check_tls
from jgr.serving.http.ports import bind
from tests.serving.certificates import make_pems, tls
from tests.serving.fakes import PATIENCE_S, LiveServer, make_config
from tests.serving.http.test_http import ROOT

BODY = {"history": ["a"], "top_k": 1}
SHOP, OTHER = "https://shop.example", "https://other.example"
PREFLIGHT = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type",
}
JGR = "import sys; from jgr.cli.main import run; sys.exit(run())"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pems(tmp_path_factory.mktemp("tls"))


def test_requests_are_answered_by_https_and_only_by_it(
    pems: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(*tls(pems)) as server:
        assert server.listener.url == f"https://127.0.0.1:{server.port}"
        context = ssl.create_default_context(cafile=str(pems["authority"]))
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=PATIENCE_S, context=context
        )
        for _ in range(2):  # one connection has both
            connection.request("POST", "/v1/recommend", json.dumps(BODY))
            with connection.getresponse() as response:
                assert json.loads(response.read())["items"][0]["item_id"] == "c"
        connection.close()
        with server.connect() as plain:
            plain.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP/1.1" not in plain.recv(1000)
        with pytest.raises(ssl.SSLCertVerificationError), server.connect() as strange:
            ssl.create_default_context().wrap_socket(strange, server_hostname="127.0.0.1")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, OSError)), server.connect() as ancient:
            old.wrap_socket(ancient)
    assert "Traceback" not in caplog.text


def test_a_client_that_leaves_an_https_connection_is_cancelled(pems: dict[str, Path]) -> None:
    with LiveServer(*tls(pems)) as server:
        context = ssl.create_default_context(cafile=str(pems["authority"]))
        server.executor.hold()
        connection = http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=PATIENCE_S, context=context
        )
        connection.request("POST", "/v1/recommend", json.dumps(BODY))
        server.executor.wait_entered()
        connection.close()
        asking = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE_S, context=context)

        def cancelled() -> bool:
            asking.request("GET", "/metrics")
            with asking.getresponse() as response:
                return b"\njgr_cancelled_total 1.0" in response.read()

        assert any(cancelled() for _ in range(10_000))
        asking.close()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("other", "are no PEM certificate with its key, without a password: KEY_VALUES_MISMATCH"),
        ("certificate", "are no PEM certificate with its key"),
        ("gone", "server.tls_key: "),
    ],
)
def test_a_bad_pair_is_one_clear_line(pems: dict[str, Path], broken: str, words: str, tmp_path: Path) -> None:
    key = pems.get(broken, tmp_path / "gone.pem")
    config = make_config(f"server.tls_certificate={pems['certificate']}", f"server.tls_key={key}")
    with pytest.raises(ConfigError) as raised:
        check_tls(config.server)
    message = str(raised.value)
    assert message.startswith("server.tls") and words in message and "\n" not in message


def test_a_key_with_a_password_ends_the_start_and_asks_nobody(pems: dict[str, Path], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pems["key"].read_bytes(), None)
    locked = tmp_path / "locked.pem"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"s3cret")))
    settings = (f"--set=server.tls_certificate={pems['certificate']}", f"--set=server.tls_key={locked}")
    command = [sys.executable, "-c", JGR, "serve", "--null", *settings]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("jgr: server.tls_certificate, server.tls_key: ")
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.tls_key=key.pem", "one is of no use without the other"),
        ("server.base_path=jgr", "must be a path such as /jgr"),
        ("server.base_path=/jgr/", "must be a path such as /jgr"),
        ("server.base_path=/a//b", "must be a path such as /jgr"),
        ("server.base_path=/..", "must be a path such as /jgr"),
        ("server.base_path=/a/./b", "must be a path such as /jgr"),
        ("server.base_path=/v1", "server.base_path must not begin with /v1, a path of the server itself"),
        ("server.base_path=/health/jgr", "must not begin with /health"),
        ("server.base_path=/openapi.json", "must not begin with /openapi.json"),
        ("server.cors_origins=shop.example", "must be * or origins such as https://shop.example"),
        ("server.cors_origins=https://shop.example/", "must be * or origins"),
        ("server.grpc_port=-1", "server.grpc_port must be 0 to 65535 or none"),
        ("server.grpc_port=8000 server.port=8000", "server.grpc_port must not be server.port"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_config(*setting.split())


def allowed(reply: Any) -> str | None:
    found: str | None = reply.headers.get("access-control-allow-origin")
    return found


def test_pages_of_the_origins_may_ask_and_others_may_not() -> None:
    settings = (f"server.cors_origins={SHOP},http://localhost:3000", "server.api_key=s3cret")
    with LiveServer(*settings) as server:
        preflight = server.call("/v1/recommend", method="OPTIONS", origin=SHOP, **PREFLIGHT)
        assert (preflight.status, allowed(preflight)) == (200, SHOP), "a preflight has no key"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        other = server.call("/v1/recommend", method="OPTIONS", origin=OTHER, **PREFLIGHT)
        assert (other.status, allowed(other)) == (400, None)
        key = {"authorization": "Bearer s3cret"}
        reply = server.call("/v1/recommend", BODY, origin="http://localhost:3000", **key)
        assert (reply.status, allowed(reply)) == (200, "http://localhost:3000")
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
        refused = server.call("/v1/recommend", BODY, origin=SHOP)
        assert (refused.status, allowed(refused)) == (401, SHOP), "a page reads why it was refused"
        assert allowed(server.call("/v1/recommend", BODY, origin=OTHER, **key)) is None
        assert allowed(server.call("/v1/recommend", BODY, **key)) is None
        assert "access-control-allow-credentials" not in reply.headers


def test_without_origins_nothing_is_said_of_them(server: LiveServer) -> None:
    reply = server.call("/v1/recommend", BODY, origin=SHOP)
    assert reply.status == 200 and not any(name.startswith("access-control") for name in reply.headers)
    assert server.call("/v1/recommend", method="OPTIONS", origin=SHOP, **PREFLIGHT).status == 405


def test_any_origin_may_ask_where_that_is_said() -> None:
    with LiveServer("server.cors_origins=*") as server:
        assert allowed(server.call("/v1/recommend", BODY, origin=OTHER)) == "*"


def test_no_path_of_the_server_can_be_a_base_path() -> None:
    with LiveServer() as server:
        described = list(server.call("/openapi.json").json["paths"])
    firsts = {"/" + path.split("/")[1] for path in (*described, *PATHS, *ui_page.PATHS)} - {"/"}
    assert firsts == set(OWN_PATHS)
    for path in ("/..jgr/.well-known", "/v1x", "/jgr/v1"):
        make_config(f"server.base_path={path}")


def test_requests_are_answered_below_the_base_path_and_without_it() -> None:
    settings = (
        "server.base_path=/shop/jgr", "server.api_key=s3cret", "server.admin_key=4dm1n-k3y", "server.open_metrics=true"
    )  # fmt: skip
    with LiveServer(*settings) as server:
        key = {"authorization": "Bearer s3cret"}
        for path in ("/v1/recommend", "/shop/jgr/v1/recommend"):
            assert server.call(path, BODY, **key).json["items"][0]["item_id"] == "c"
            assert server.call(path, BODY).status == 401
        assert server.call("/shop/jgr/health/live").status == 200
        assert server.call("/shop/jgr/v2", **key).json["name"] == "jgr"
        for path in ("/shop/jgrv1/models", "/shop/v1/models", "/shop/jgrs", "/shop/jgr/shop/jgr/v1/models"):
            assert server.call(path, **key).status == 404, path
        assert server.call("/shop/jgr/v1/models", **key).status == 200
        page = server.call("/shop/jgr", **key)
        assert (page.status, page.headers["location"]) == (302, "/shop/jgr/ui")
        # An admin's path is one, with whatever stands before it.
        assert server.call("/shop/jgr/v1/models/jgr/reload", b"", **key).status == 403
        admin = {"authorization": "Bearer 4dm1n-k3y"}
        assert server.call("/shop/jgr/v1/models/jgr/reload", b"", **admin).status == 409
        assert server.call("/shop/jgr/openapi.json", **key).json["servers"] == [{"url": "/shop/jgr"}]
        assert server.metric('jgr_requests_total{endpoint="/v1/recommend",status="200"}') == 2


@pytest.mark.parametrize("group", ["health", "metrics", "docs", "ui"])
def test_each_group_is_open_by_its_own_flag(group: str) -> None:
    paths = {
        "health": ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"),
        "metrics": ("/metrics",),
        "docs": ("/docs", "/openapi.json", *PATHS),
        "ui": ui_page.PATHS,
    }
    flags = [f"server.open_{name}={str(name == group).lower()}" for name in paths]
    with LiveServer("server.api_key=s3cret", *flags) as server:
        for name, own in paths.items():
            for path in own:
                assert server.call(path).status == (200 if name == group else 401), path
                assert server.call(path, authorization="Bearer s3cret").status == 200, path
        for path in ("/v1/models", "/v2", "/docs/../v1/models", "/docs/x", "/metrics/", "/health"):
            assert server.call(path).status == 401, path
        described = server.call("/openapi.json", authorization="Bearer s3cret").json["paths"]
        secured = {
            path
            for path in ("/metrics", "/docs", "/ui", "/health/live")
            if "security" in described[path]["get"]
        }
        assert secured == {
            f"/{name}" if name != "health" else "/health/live" for name in paths if name != group
        }


def test_the_page_asks_nobody_else_and_its_files_are_there(server: LiveServer) -> None:
    page = server.call("/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"] == POLICY and "unsafe-eval" not in POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    text = page.body.decode()
    sources = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert all(source.startswith(("docs/", "data:")) for source in sources) and len(sources) == 4
    assert "<script>" not in text and "http" not in text
    for source in sources:
        if source.startswith("docs/"):
            reply = server.call(f"/{source}")
            assert reply.status == 200 and reply.body
            assert reply.headers["content-type"].startswith(
                "text/css" if source.endswith("css") else "text/javascript"
            )
    start = server.call("/docs/start.js").body.decode()
    assert 'url: "openapi.json"' in start and "validatorUrl: null" in start
    assert b"SwaggerUIBundle" in server.call("/docs/swagger-ui-bundle.js").body
    folder = ROOT / "jgr/serving/http/swagger_ui"
    assert "Apache License" in (folder / "LICENSE").read_text()


def test_a_port_of_plain_text_that_speaks_tls_is_left_alone(pems: dict[str, Path]) -> None:
    with LiveServer() as server, pytest.raises((ssl.SSLError, OSError)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as plain:
            ssl.create_default_context(cafile=str(pems["authority"])).wrap_socket(
                plain, server_hostname="127.0.0.1"
            )


@pytest.mark.parametrize("host", ["\0", "\ud800"])
def test_a_host_that_is_no_name_is_one_line(host: str) -> None:
    with pytest.raises(UserError, match="cannot listen on") as raised:
        bind(host, 0)
    assert str(raised.value).isprintable()
