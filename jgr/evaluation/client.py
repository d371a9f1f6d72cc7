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
from jgr.client.remote import Client
from jgr.data.interactions import Examples
from jgr.evaluation.served import Query, check_catalog, path, rows_of
from jgr.serving.api import Answer, Item, ModelInfo

CONNECTIONS = 16


class RemoteServer:
    """A model of a running server, asked through jgr.evaluation.served.Served.

    catalog: must be the one that the answers name. name: the model to ask; where the server has none of that name with
    this catalog, the first that has the catalog, which `info` names.
    """

    in_flight = CONNECTIONS

    def __init__(self, client: Client, catalog: Catalog, name: str = "") -> None:
        models = client.models()
        check_catalog("server", {model.catalog_version for model in models}, catalog)
        fitting = [model for model in models if model.catalog_version == catalog.version]
        self.info: ModelInfo = next((model for model in fitting if model.id == name), fitting[0])
        self._client, self._catalog = client, catalog

    def recommend_all(
        self, examples: Examples, query: Query, on_answer: Callable[[], None] = lambda: None
    ) -> npt.NDArray[np.int32]:
        """See Served. Raises RequestFailed."""
        ranked = np.full((len(examples), query.top_k), -1, np.int32)

        def ask(i: int) -> None:
            body = query.of(self._catalog, self.info, examples, i)
            rows = rows_of(self._catalog, [item.item_id for item in self._ask(path(self.info), body)])
            ranked[i, : len(rows)] = rows
            on_answer()

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for _ in pool.map(ask, range(len(examples))):
                pass
        return ranked

    def rank_all(
        self, requests: Sequence[dict[str, Any]], on_answer: Callable[[], None] = lambda: None
    ) -> list[list[Item]]:
        """See Served. Raises RequestFailed."""

        def ask(body: dict[str, Any]) -> list[Item]:
            items = self._ask("/v1/rank", body)
            on_answer()
            return items

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(ask, requests))

    def _ask(self, endpoint: str, body: dict[str, Any]) -> list[Item]:
        content = msgspec.json.encode({**body, "model": self.info.id})
        return self._client.fetch("POST", endpoint, content, Answer).items

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
