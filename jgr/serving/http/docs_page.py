# SPDX-License-Identifier: Apache-2.0
"""`/docs`: Swagger UI over `/openapi.json`, from files that come with jgr (`swagger_ui/`, where its licence is too).

Nothing is asked of another server, and the content security policy forbids it. All addresses are relative, so that the
page works below any base path.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jgr.serving.http.pages import page_headers, policy

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jgr API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; openapi.json has the same without it.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """const dark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", dress);
dress();
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  tryItOutEnabled: true,
  validatorUrl: null,
  queryConfigEnabled: false,
});
"""
"""A file of its own, since the policy allows no script in the page."""
POLICY = policy(
    "script-src 'self'",
    "style-src 'self' 'unsafe-inline'",  # Swagger UI sets styles of its elements
    "img-src 'self' data:",
    "font-src 'self' data:",
    "connect-src 'self'",
)
_HEADERS = page_headers(POLICY)
_KEPT = {**_HEADERS, "Cache-Control": "public, max-age=3600"}
_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


@cache
def _content(name: str) -> bytes:
    return files("jgr.serving.http").joinpath("swagger_ui", name).read_bytes()


async def _page(request: HttpRequest) -> Response:
    return Response(PAGE, 200, _HEADERS, "text/html")


async def _start(request: HttpRequest) -> Response:
    return Response(START, 200, _KEPT, "text/javascript")


async def _file(name: str, request: HttpRequest) -> Response:
    return Response(_content(name), 200, _KEPT, _FILES[name])


ROUTES = (
    Route("/docs", _page),
    Route("/docs/start.js", _start),
    *(Route(f"/docs/{name}", partial(_file, name)) for name in _FILES),
)
PATHS = tuple(route.path for route in ROUTES)
