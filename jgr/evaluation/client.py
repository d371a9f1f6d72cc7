# SPDX-License-Identifier: Apache-2.0
"""Rankings for evaluation, asked of a running server: plain blocking HTTP from a few threads."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from jgr.catalog import Catalog
from jgr.config import UserError
from jgr.data.interactions import Examples

CONNECTIONS = 16
TIMEOUT_S = 60.0


class ServerError(UserError):
    """The server cannot be reached, or refused a request; the message holds its own words."""


class Client:
    """Keep-alive connections to one jgr server, one for each calling thread; `close` ends them all."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ServerError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; no other thread may be asking."""
        for connection in self._open:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request. Raises ServerError for anything but 200."""
        return self._ask("POST", path, json.dumps(body).encode())

    def get(self, path: str) -> dict[str, Any]:
        """As `post`, without a body."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            connection = self._connection()
            connection.request(method, path, body, {**self._headers, "Content-Type": "application/json"})
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"http://{self._host}:{self._port}{path}: {error}") from None
        if response.status != 200:
            message = answer.get("error", {}).get("message", answer)
            raise ServerError(f"http://{self._host}:{self._port}{path}: {response.status}: {message}")
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's own."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            self._local.connection = connection
            self._open.append(connection)
        return connection


def recommend_all(
    client: Client,
    catalog: Catalog,
    examples: Examples,
    *,
    top_k: int,
    beam_width: int | None = None,
    exclude_history: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.int32]:
    """The server's top_k rows for every example's history: [n, top_k] int32, best first, -1 where it gave fewer.

    catalog: must be the one that the server's answers name. on_answer: called after each answer, from any thread.
    """
    versions = {model["catalog_version"] for model in client.get("/v1/models")["data"]}
    if catalog.version not in versions:
        raise ServerError(
            f"the server's catalog is {', '.join(versions)}, the dataset's is {catalog.version}"
        )
    ranked = np.full((len(examples), top_k), -1, np.int32)

    def ask(i: int) -> None:
        answer = client.post(
            "/v1/recommend",
            {
                "history": [catalog.item_ids[row] for row in examples.histories[i]],
                "top_k": top_k,
                "beam_width": beam_width,
                "exclude_history": exclude_history,
            },
        )
        rows, unknown = catalog.rows([item["item_id"] for item in answer["items"]])
        if unknown:
            raise ServerError(f"the server recommended items that the catalog lacks: {unknown[:3]}")
        ranked[i, : len(rows)] = rows
        on_answer()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in pool.map(ask, range(len(examples))):
            pass
    return ranked
