# SPDX-License-Identifier: Apache-2.0
"""Rankings for evaluation, asked of a running server from a few threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.client import remote
from jgr.client.errors import RequestFailed
from jgr.config import UserError
from jgr.data.interactions import Examples
from jgr.evaluation.served import Query, check_catalog, path, rows_of
from jgr.serving.api import Item, ModelInfo, ModelList
from jgr.serving.errors import STATUS

CONNECTIONS = 16


class ServerError(UserError):
    """The server cannot be reached, or refused a request; the message holds its own words."""


class Client:
    """A jgr server that is asked for JSON, from any thread; `close` ends its connections. UserError for a bad URL."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self._url, self._server = url, remote.Client(url, api_key)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._server.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one POST of `body` as JSON. Raises ServerError for anything but 200."""
        return self._ask("POST", path, msgspec.json.encode(body))

    def get(self, path: str) -> dict[str, Any]:
        """The answer to one GET. Raises ServerError for anything but 200."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            return self._server.fetch(method, path, body, dict[str, Any])
        except RequestFailed as error:
            raise ServerError(f"{self._url}{path}: {STATUS[error.type]}: {error}") from None


class RemoteServer:
    """A model of a running server, asked through jgr.evaluation.served.Served.

    catalog: must be the one that the answers name. name: the model to ask; "": the first that has the catalog.
    """

    in_flight = CONNECTIONS

    def __init__(self, client: Client, catalog: Catalog, name: str = "") -> None:
        try:
            models = msgspec.convert(client.get("/v1/models"), ModelList).data
        except msgspec.ValidationError as error:
            raise ServerError(f"/v1/models: is not the answer of a jgr server: {error}") from None
        check_catalog("server", {model.catalog_version for model in models}, catalog)
        fitting = [model for model in models if model.catalog_version == catalog.version]
        self.info: ModelInfo = next((model for model in fitting if model.id == name), fitting[0])
        self._client, self._catalog = client, catalog

    def recommend_all(
        self, examples: Examples, query: Query, on_answer: Callable[[], None] = lambda: None
    ) -> npt.NDArray[np.int32]:
        """See Served. Raises ServerError."""
        ranked = np.full((len(examples), query.top_k), -1, np.int32)

        def ask(i: int) -> None:
            body = query.of(self._catalog, self.info, examples, i)
            answer = self._ask(path(self.info), body)
            rows = rows_of(self._catalog, [item["item_id"] for item in answer["items"]])
            ranked[i, : len(rows)] = rows
            on_answer()

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for _ in pool.map(ask, range(len(examples))):
                pass
        return ranked

    def rank_all(
        self, requests: Sequence[dict[str, Any]], on_answer: Callable[[], None] = lambda: None
    ) -> list[list[Item]]:
        """See Served. Raises ServerError."""

        def ask(body: dict[str, Any]) -> list[Item]:
            items = msgspec.convert(self._ask("/v1/rank", body)["items"], list[Item])
            on_answer()
            return items

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(ask, requests))

    def _ask(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._client.post(endpoint, {**body, "model": self.info.id})

    def latencies_s(self, examples: Examples, queries: Sequence[Query]) -> list[list[float]]:
        """See Served: over one connection, from the request to the answer as this process reads it."""
        seconds: list[list[float]] = [[] for _ in queries]
        for i in range(len(examples)):
            for query, taken in zip(queries, seconds, strict=True):
                body = query.of(self._catalog, self.info, examples, i)
                start = time.perf_counter()
                self._ask(path(self.info), body)
                taken.append(time.perf_counter() - start)
        return seconds


def recommend_all(
    client: Client,
    catalog: Catalog,
    examples: Examples,
    *,
    top_k: int,
    exclude_history: bool = False,
    on_answer: Callable[[], None] = lambda: None,
) -> npt.NDArray[np.int32]:
    """`RemoteServer.recommend_all` in one call."""
    query = Query(top_k, exclude_history=exclude_history)
    return RemoteServer(client, catalog).recommend_all(examples, query, on_answer)
