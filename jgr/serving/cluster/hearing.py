# SPDX-License-Identifier: Apache-2.0
"""What the router of a process hears of its replicas, without Ray, which calls it wherever it learns of a change."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jgr.serving.cluster.protocol import PROTOCOL
from jgr.serving.cluster.reports import Shape, report
from jgr.serving.cluster.series import Series
from jgr.serving.policies.routing import Router

_log = logging.getLogger(__name__)


class Hearing:
    """shape: of prompts, by the last report. strangers: replicas of a jgr that this one does not understand."""

    def __init__(self, policy: Router, series: Series) -> None:
        self._policy, self._series = policy, series
        self._numbers: dict[str, int] = {}  # of the last report of each replica
        self._logged: set[str] = set()  # replicas of which it was logged that they cannot be read
        self.shape: Shape = {}
        self.strangers: set[str] = set()

    def become(self, names: Collection[str]) -> None:
        """Forget all replicas but these."""
        self._numbers = {name: number for name, number in self._numbers.items() if name in names}
        self._logged &= set(names)
        self.strangers &= set(names)

    def hear(self, name: str, stats: Mapping[str, Any]) -> None:
        """What Ray has of a replica: its last report, again and again, for Ray brings those of all where one is new. So
        a replica is silent while the report's number stays. Raises nothing: Ray's poll calls this, and would end with
        an error, so that the process would never hear of a replica again."""
        if not stats:
            return
        if stats.get("protocol") != PROTOCOL:
            self.strangers.add(name)
            return
        try:
            if self._numbers.get(name) != stats["number"]:
                self._numbers[name] = stats["number"]
                self._read(name, stats)
        except Exception as error:
            self._log_once(name, "is left out", error)

    def _read(self, name: str, stats: Mapping[str, Any]) -> None:
        told = report(stats)
        try:
            self._policy.heard(name, told)
        except ValueError as error:  # fleet.digest_bits is another one there: a deployment is under way
            self._log_once(name, "counts without what its caches hold", error)
            self._policy.heard(name, replace(told, users=b"", items=b"", shards=b""))
        self._series.heard(name)
        self.shape = stats

    def _log_once(self, name: str, what: str, error: Exception) -> None:
        if name not in self._logged:
            self._logged.add(name)
            _log.warning("a report of replica %s cannot be read, and %s: %s", name, what, error)
