# SPDX-License-Identifier: Apache-2.0
"""What a fleet's clients see of a fault: requests lost, wrong answers, deadlines missed, and seconds until all is well.

Two replicas of two small models on a real Ray, and callers in an open loop whose requests have 2 s each. For each fault
they ask for some seconds before it, until the fleet is whole again, and some seconds more. Each answer is compared
with that of one engine of the version that it names. lost: neither an answer nor a refusal that names the deadline or
a full queue; late: not within its deadline; missed_later: not answered in time of those sent 2 s after the fault and
later. Where two nodes cannot be made
(`benchmarks.fleet_nodes`), their rows say that they have not run.

    python -m benchmarks.fleet_faults [--quick]
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fault_world, fleet_features, fleet_nodes, harness
from benchmarks.fault_world import (
    COORDINATOR,
    FRONT,
    PROXY,
    REPLICA,
    Callers,
    Fleet,
    Models,
    Reference,
    outcomes,
    until,
)
from benchmarks.fleet_features import Featured, FeaturedReference
from benchmarks.fleet_nodes import Nodes
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from benchmarks.soak_world import drawn

RATE = 12.0
BEFORE_S, AFTER_S, SETTLED_S = 2.0, 4.0, 2.0
CUT_S = 8.0
BEGUN_S = 0.1
"""So long after it was asked for, the first replica's reload has begun, and the second's has not."""
SLOW_S, SLOWER = 8.0, 10
"""So long a replica runs at a tenth of its speed."""

Whole = Callable[[], bool]


class Faults:
    """What can be done to a fleet. Each does it, and gives what tells whether the fleet is whole again."""

    def __init__(self, models: Models, fleet: Fleet) -> None:
        self._models, self._fleet = models, fleet
        self.seen = ""
        """What the last one has seen besides."""

    def none(self) -> Whole:
        return lambda: True

    def killed_replica(self) -> Whole:
        return self._replaced(signal.SIGKILL)

    def hanging_replica(self) -> Whole:
        return self._replaced(signal.SIGSTOP)

    def slow_replica(self) -> Whole:
        """Stopped for nine of ten pieces of 50 ms, by turns."""
        victim, ends_s = self._fleet.pids(REPLICA)[0], time.monotonic() + SLOW_S
        ended = threading.Event()

        def go() -> None:
            with suppress(ProcessLookupError):
                while time.monotonic() < ends_s:
                    os.kill(victim, signal.SIGSTOP)
                    time.sleep(0.05 * (SLOWER - 1))
                    os.kill(victim, signal.SIGCONT)
                    time.sleep(0.05)
            ended.set()

        threading.Thread(target=go).start()
        return lambda: ended.is_set() and len(self._fleet.served()) == self._fleet.replicas

    def killed_front(self) -> Whole:
        return self._restarted(FRONT)

    def killed_proxy(self) -> Whole:
        return self._restarted(PROXY)

    def killed_coordinator_then_replica(self) -> Whole:
        """After a catalog was activated: the replica that is started must have it."""
        version = self._fleet.change("/v1/catalogs?model=jgr", self._models.catalog)["version"]
        self._fleet.change(f"/v1/catalogs/{version}/activate?model=jgr")
        if until(lambda: {catalog for _, catalog in self._fleet.served().values()} == {version}) is None:
            raise RuntimeError("the catalog was not activated")
        for pid in self._fleet.pids(COORDINATOR):
            os.kill(pid, signal.SIGKILL)
        replaced = self._replaced(signal.SIGKILL)
        return lambda: replaced() and {catalog for _, catalog in self._fleet.served().values()} == {version}

    def catalog_rolled_back(self) -> Whole:
        before = set(self._fleet.served().values())
        self._fleet.change("/v1/catalogs/rollback?model=jgr")
        return lambda: self._one_version() and not before & set(self._fleet.served().values())

    def reload(self) -> Whole:
        before = set(self._fleet.served().values())
        self._models.switch("two")
        self._fleet.change("/v1/models/jgr/reload")
        return lambda: self._one_version() and not before & set(self._fleet.served().values())

    def reload_with_a_bad_second(self) -> Whole:
        """The folder is good for the first replica and broken for the second: all must go back. A load looks where
        the link leads once, when it begins."""
        before = self._fleet.served()
        (old,) = set(before.values())
        self._models.switch("one")
        self._fleet.change("/v1/models/jgr/reload")
        time.sleep(BEGUN_S)
        self._models.switch("empty")
        if until(lambda: any(version != old for version in self._fleet.served().values())) is None:
            raise RuntimeError("no replica has reloaded")

        def back() -> bool:
            return self._fleet.served() == before

        return back

    def _one_version(self) -> bool:
        served = self._fleet.served()
        return len(served) == self._fleet.replicas and len(set(served.values())) == 1

    def _replaced(self, by: signal.Signals) -> Whole:
        before, victim = set(self._fleet.served()), self._fleet.pids(REPLICA)[0]
        os.kill(victim, by)

        def whole() -> bool:
            now = set(self._fleet.served())
            return len(now) == self._fleet.replicas and now != before

        return whole

    def _restarted(self, of: str) -> Whole:
        before = set(self._fleet.pids(of))
        for pid in before:
            os.kill(pid, signal.SIGKILL)

        def whole() -> bool:
            return (
                not before & set(self._fleet.pids(of)) and len(self._fleet.served()) == self._fleet.replicas
            )

        return whole


class NodeFaults(Faults):
    """What can be done to two nodes."""

    def __init__(self, models: Models, fleet: Fleet, nodes: Nodes) -> None:
        super().__init__(models, fleet)
        self._nodes = nodes

    def cut(self) -> Whole:
        self._nodes.cut()
        time.sleep(CUT_S)
        self._nodes.mend()
        return self._one_version

    def killed_gcs(self) -> Whole:
        command = self._nodes.kill_head()
        time.sleep(CUT_S / 2)
        self._nodes.start_head(command)
        return self._one_version

    def bad_node(self) -> Whole:
        """The second node's folder of the new version is empty: the replica there fails, and none may serve it in the
        end. Where the good one was asked first, both are whole once it has gone back."""
        before = self._fleet.served()
        self._models.switch("two")
        self._fleet.change("/v1/models/jgr/reload")
        if until(lambda: "failed" in self._fleet.reloads().values()) is None:
            raise RuntimeError("no replica failed")
        others = [state for state in self._fleet.reloads().values() if state != "failed"]
        self.seen = (
            "the bad one was asked first" if others == ["never"] else "the good one had changed before"
        )
        return lambda: self._fleet.served() == before

    def another_jgr(self) -> Whole:
        """A replica dies on a node that has another jgr by now: the one in its place must be refused."""
        before = set(self._fleet.served())
        (victim,) = self._nodes.pids(True, REPLICA)
        self._nodes.give_another_jgr()
        try:
            os.kill(victim, signal.SIGKILL)
            refused = until(self._nodes.refused)
        finally:
            self._nodes.take_it_back()
        if refused is None:
            raise RuntimeError("no replica was refused by name")
        return lambda: self._one_version() and set(self._fleet.served()) != before

    def killed_proxy(self) -> Whole:
        before = set(self._nodes.pids(False, PROXY))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        return lambda: not before & set(self._nodes.pids(False, PROXY)) and self._one_version()


KILLED = "replica killed"
STORE = "the feature store's Redis gone for 6 s"
NODE_FAULTS = (
    "two nodes, nothing goes between them for 8 s",
    "two nodes, the head's storage killed and started again from Redis",
    "two nodes, reload with one bad node",
    "two nodes, a proxy killed, jgr.Client",
    "two nodes, a replica killed where another jgr is by now",
)
FAULTS = (
    ("nothing", Faults.none, 0),
    (KILLED, Faults.killed_replica, 0),
    ("replica hangs", Faults.hanging_replica, 0),
    ("replica 10x slower", Faults.slow_replica, 0),
    ("front killed, bare connections", Faults.killed_front, 0),
    ("front killed, jgr.Client", Faults.killed_front, 60),
    ("proxy killed, bare connections", Faults.killed_proxy, 0),
    ("proxy killed, jgr.Client", Faults.killed_proxy, 60),
    ("coordinator and replica killed, another catalog", Faults.killed_coordinator_then_replica, 0),
    ("catalog rolled back", Faults.catalog_rolled_back, 0),
    ("reload", Faults.reload, 0),
    ("reload with one bad node", Faults.reload_with_a_bad_second, 0),
)
"""Words, what is done, and how often a caller sends a request again."""
QUICK = (KILLED,)
LOSES = (KILLED, "reload", "jgr.Client", "catalog", "nothing", STORE)
"""Faults that may lose nothing."""


def under(
    name: str,
    begin: Callable[[], Whole],
    fleet: Fleet,
    reference: Reference | FeaturedReference,
    retries: int,
    urls: Sequence[str] = (),
    draw: Callable[[random.Random], tuple[str, dict[str, Any]]] = drawn,
) -> Row:
    """One fault in load. urls: of several proxies, where there are. draw: makes a request."""
    patience = fault_world.PATIENCE_S
    with Callers(urls or [fleet.url], RATE, retries, seed=len(name), draw=draw) as callers:
        time.sleep(BEFORE_S)
        begun_s = time.monotonic()
        try:
            whole = begin()
        except (RuntimeError, ValueError) as error:
            return {"fault": name, "ran": False, "why": str(error)}
        waited_s = until(whole, patience)
        whole_s = time.monotonic() - begun_s
        time.sleep(AFTER_S)
    calls = [call for call in callers.calls]
    found = outcomes(calls)
    wrong = reference.wrong(calls)
    late = [call for call in calls if call.at_s > begun_s + SETTLED_S and call.outcome != "ok"]
    reasons = sorted({str(call.answer.get("error"))[:200] for call in calls if call.outcome == "lost"})
    row: Row = {
        "fault": name,
        "ran": True,
        "sent": len(calls),
        "lost": found["lost"],
        "late": found["late"],
        "refused": found["refused"],
        "wrong": len(wrong),
        "missed_later": len(late),
        "whole_s": None if waited_s is None else rounded(whole_s, 3),
        **({"why_lost": reasons[:3]} if reasons else {}),
        **({"why_wrong": [reason[:300] for reason in wrong[:3]]} if wrong else {}),
    }
    print(row, flush=True)
    return row


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on what may be lost, what is wrong, and the time until a killed replica is replaced."""
    harness.require("ray", "2.60.0")
    quiet.wait()
    chosen = [each for each in FAULTS if not quick or each[0] in QUICK]
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-f")))
        models = Models(folder)
        reference = Reference(models)
        stack.callback(reference.close)
        fleet = stack.enter_context(Fleet(models.files, 2, folder / "ray"))
        faults = Faults(models, fleet)
        for name, fault, retries in chosen:
            rows.append(under(name, partial(fault, faults), fleet, reference, retries))
    if not quick:
        rows += [without_features(), *between_nodes()]
    return Measured(claims([row for row in rows if row["ran"]]), rows)


def without_features() -> Row:
    """The feature store is gone for some seconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-r")))
        featured = stack.enter_context(Featured(folder))
        reference = featured.reference()
        stack.callback(reference.close)
        fleet = stack.enter_context(Fleet(featured.files, 2, folder / "ray"))
        begin = partial(featured.gone_and_back, fleet)
        row = under(STORE, begin, fleet, reference, 0, draw=fleet_features.drawn)
        return {**row, "answers_without_all_features": reference.without_features}


def between_nodes() -> list[Row]:
    """The faults of two nodes. A row that has not run says why, and counts for nothing."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-n")))
        models = Models(folder)
        try:
            nodes = stack.enter_context(Nodes(models, folder))
            fleet = nodes.fleet("fleet.fronts=2")  # Ray spreads them: one on each node
            stack.callback(fleet.process.kill)
        except Missing as missing:
            return [{"fault": name, "ran": False, "why": str(missing)} for name in NODE_FAULTS]
        reference = Reference(models)
        stack.callback(reference.close)
        faults = NodeFaults(models, fleet, nodes)
        begin = {
            NODE_FAULTS[0]: faults.cut,
            NODE_FAULTS[1]: faults.killed_gcs,
            NODE_FAULTS[2]: faults.bad_node,
            NODE_FAULTS[3]: faults.killed_proxy,
            NODE_FAULTS[4]: faults.another_jgr,
        }
        rows: list[Row] = []
        for name, fault in begin.items():
            faults.seen = ""
            row = under(name, fault, fleet, reference, 60, nodes.urls)
            rows.append({**row, "seen": faults.seen} if faults.seen else row)
        return rows


def claims(rows: Sequence[Row]) -> list[Claim]:
    strict = [row for row in rows if any(name in str(row["fault"]) for name in LOSES)]
    found = [
        Claim("fleet-faults-wrong", sum(int(row["wrong"]) for row in rows), "answers", "lower", 0.0),
        Claim("fleet-faults-lost", sum(int(row["lost"]) for row in strict), "requests", "lower", 0.0),
        Claim("fleet-faults-not-whole", sum(row["whole_s"] is None for row in rows), "faults", "lower", 0.0),
    ]
    for row in rows:
        if row["fault"] == KILLED:
            found.append(Claim("fleet-faults-missed", int(row["missed_later"]), "requests", "lower", 0.0))
            if row["whole_s"] is not None:
                found.append(Claim("fleet-faults-whole", float(row["whole_s"]), "s", "lower", 30.0))
    return found


SOURCES = [Path(__file__), *(Path(str(each.__file__)) for each in (fault_world, fleet_features, fleet_nodes))]

if __name__ == "__main__":
    harness.main(Benchmark("fleet_faults", measure, ("numpy",), SOURCES))
