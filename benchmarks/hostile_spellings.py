# SPDX-License-Identifier: Apache-2.0
"""Paths, origins and keys of odd spelling, and requests made of them."""

from __future__ import annotations

import random
import re

from benchmarks.hostile_requests import Call
from benchmarks.hostile_world import ADMIN_KEY

KEY, SHOP, MAIL = "cl13nt-k3y", "sh0p-k3y-0123456789", "m4il-k3y-0123456789"
SECRETS = tuple(key.encode() for key in (KEY, SHOP, MAIL, ADMIN_KEY))
BEARER = {"Authorization": f"Bearer {KEY}"}
ORIGIN = "https://shop.example"
PATHS = (
    "/jgr/v1/rank", "/jgr//v1/rank", "/jgr/../v1/rank", "/jgr%2fv1/rank", "/JGR/v1/rank", "/jgrx/v1/rank", "//v1/rank",
    "/jgr/jgr/v1/rank", "/jgr", "/jgr/", "/jgr/%2e%2e/v1/models/jgr/reload", "/jgr/v1/models/jgr/reload",
    "/v1/./catalogs", "/v1/catalogs/", "//v1/catalogs",
    "/jgr/v1/catalogs", "/v2/models/rank%2finfer", "/v2/models/%2e%2e/infer",
    "/v2/",
    "/docs/../metrics", "/docs/%2e%2e/openapi.json", "/docs/swagger-ui-bundle.js.LICENSE.txt",
    "/docs/swagger-ui.css%00", "/docs/start.js", "/jgr/docs", "/metrics/", "/metrics?x=1", "/health/live/../../metrics",
    "/health/live/%2e%2e/%2e%2e/metrics",
    "/ui/", "/ui/../metrics", "/ui/%2e%2e/ui_page.py", "/ui/app.js%00", "/ui/..%5cpages.py", "/jgr/ui/app.js", "//ui",
    "/v1/items?query=%ff%00%0a", "/v1/items?query=(a%2b)%2b%24&limit=100",
    "/v1/items?query=%f0%9f%98%80&query=i&limit=1",
    "/v1/items?limit=-0", "/v1/items?limit=%d9%a1", "/v1/items?limit=1e1", "/v1/items?query=" + "%C3%9F" * 256,
    "/v1/items?query=" + "x" * 5_000, "/v1/items?model=tiny&tenant=mail&query=B", "/v1/items/", "/v1/items/%2e%2e",
    "/v1/explain/recommend/", "/v1/explain/", "/v1/explain/rerank", "/V1/explain/rank",
    "/v2/health/live%0a", "/v2/health/live;/v2", "/v2/models/rank/versions/jgr", "/v2/models/rank/versions//infer",
    "/v2/models/rank/versions/a%2fb/infer", "/v2/models/rank/ready?x", "http://x/metrics", "/%ff%fe", "/v1/score#x",
    "*",
)  # fmt: skip
ORIGINS = (
    ORIGIN, "https://shop.example.evil", "https://evil.example", "null", "https://SHOP.example", "http://shop.example",
    "https://shop.example:443", "https://shop.example/", "", "*", f"{ORIGIN}, https://evil.example", f" {ORIGIN}",
)  # fmt: skip
KEYS = (
    f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer{KEY}", KEY,
    f"Basic {KEY}", f"Bearer {KEY.upper()}", "Bearer ", "Bearer", "", f"Bearer {ADMIN_KEY}", f"Token {KEY}",
    "Bearer \xff",
    f"Bearer {KEY}, Bearer {KEY}", f'Bearer "{KEY}"', f"Bearer\t{KEY}", "Bearer " + "k" * 5_000,
)  # fmt: skip


def is_clients(header: str) -> bool:
    """Whether an Authorization names a client's key, by the rule of RFC 6750 with blanks at its ends."""
    return (
        re.fullmatch(rf"(?i:bearer) +(?:{KEY}|{SHOP}|{MAIL})\s*|(?i:bearer) \s*{KEY}\s*", header) is not None
    )


def odd(rng: random.Random) -> Call:
    """A request that is odd outside of its body: path, method, origin, key."""
    method = rng.choice(
        ("GET", "GET", "GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "get")
    )
    known = rng.choice(
        (
            "/v1/rerank",
            "/v1/explain/rank",
            "/v1/items",
            "/v2/models/rank/infer",
            "/metrics",
            "/docs",
            "/ui",
            "/openapi.json",
            "/v2",
            "/health/live",
        )
    )
    path = rng.choice((*PATHS, known, known))
    call = Call(method, path, "", rng.choice((None, None, b"", b"{}", b"x" * 10_000)))
    if rng.random() < 0.8:
        call.headers["Authorization"] = rng.choice(KEYS)
    if rng.random() < 0.5:
        call.headers["Origin"] = rng.choice(ORIGINS)
    if rng.random() < 0.3:
        call.headers["Access-Control-Request-Method"] = rng.choice(("POST", "PUT", "", "x" * 200))
        call.headers["Access-Control-Request-Headers"] = rng.choice(("authorization", "x-evil", "*", ","))
    return call
