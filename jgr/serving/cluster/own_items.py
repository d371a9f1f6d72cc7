# SPDX-License-Identifier: Apache-2.0
"""A server of its own with the items that `jgr kv build` computed ahead (cache.kv): what a replica does in a fleet,
with the folder as the only other node.

Before a request takes its turn, the candidates that are not here are read from the folder, where that is cheaper than
to compute them, by threads beside the event loop. What does not come in time, or whole, is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jgr.config import Config
from jgr.serving.api import RankRequest
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.items import ItemShare
from jgr.serving.cluster.reports import Shape, ask_of
from jgr.serving.cluster.shapes import shape
from jgr.serving.versions.served_models import Models


def read_kv(models: Models, config: Config) -> None:
    """Have the engines of a server read the folder that cache.kv names; nothing where it names none. Raises ConfigError
    and UserError as ItemShare."""
    if config.cache.kv:
        OwnItems(models, config)


class OwnItems:
    """See read_kv. models: of the server; whichever engines they have, now and later, ask here first."""

    def __init__(self, models: Models, config: Config) -> None:
        kept = replace(config, fleet=replace(config.fleet, keep_fetched=True))
        self._share = ItemShare(models, kept, kv=(config.cache.kv, "cache.kv"))
        self._models = models
        self._attach()
        for deployment in models.deployments:
            deployment.swapped.append(self._attach)

    def _attach(self) -> None:
        self._shape: Shape = {}
        for deployment in self._models.deployments:
            deployment.engine.before = self._before

    async def _before(self, request: Any) -> None:
        if not isinstance(request, RankRequest) or request.candidates == "all":
            return
        hint = Hint(
            "",
            len(request.history),
            tuple(map(str, request.candidates)),
            request.deadline_ms,
            model=request.model or "",
            layout=request.layout or "",
        )
        self._shape = self._shape or shape(self._models)
        await self._share.fetch(hint, ask_of(hint, self._shape).user_tokens)
