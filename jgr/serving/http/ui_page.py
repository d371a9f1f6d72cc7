# SPDX-License-Identifier: Apache-2.0
"""`/ui`: a page that asks this server, draws how beams walk, sets two models side by side and watches the metrics.

Its files come with jgr (`ui/`): modules of plain JavaScript and a style sheet, which nothing has to build. They ask no
other server, and the content security policy forbids it; it also forbids scripts and styles in the page, and text that
is to become markup or script (Trusted Types). Only files that are there by name are served. All addresses are
relative, so that the page works below any base path.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.resources import files

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jgr.serving.http.pages import page_headers, policy

PAGE = "index.html"
POLICY = policy(
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src data:",  # the empty icon
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = page_headers(POLICY)
_FOLDER = files("jgr.serving.http").joinpath("ui")
_TYPES = {"css": "text/css", "js": "text/javascript"}
_FILES = sorted(file.name for file in _FOLDER.iterdir() if file.name != PAGE)


@cache
def _content(name: str) -> bytes:
    return _FOLDER.joinpath(name).read_bytes()


async def _page(request: HttpRequest) -> Response:
    return Response(_content(PAGE), 200, _HEADERS, "text/html")


async def _file(name: str, request: HttpRequest) -> Response:
    return Response(_content(name), 200, _HEADERS, _TYPES[name.rpartition(".")[2]])


ROUTES = (Route("/ui", _page), *(Route(f"/ui/{name}", partial(_file, name)) for name in _FILES))
PATHS = tuple(route.path for route in ROUTES)
