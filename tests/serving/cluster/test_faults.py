# SPDX-License-Identifier: Apache-2.0
"""What a fleet loses by a fault: no request and no answer's values, and it is whole again.

The faults and the world are those of `benchmarks.fleet_faults`, which measures the deadlines too: here requests have so
much time that each must be answered. A replica that is killed, and a reload, are in test_fleet.py. Ray is started once
for the faults of one machine, once for those of two nodes, and once for a scorer whose features are in Redis; each
file's tests go on from one to the next.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet_features
from benchmarks.fault_world import Callers, Fleet, Models, Reference, outcomes, until
from benchmarks.fleet_faults import Faults, NodeFaults, Whole
from benchmarks.fleet_features import Featured, FeaturedReference
from benchmarks.fleet_nodes import Nodes
from benchmarks.soak_world import drawn

pytestmark = pytest.mark.ray

LONG_S = 300.0
"""A replica that starts compiles."""
RATE, BEFORE, AFTER = 6.0, 12, 24
"""Requests a second; and how many are answered before the fault, and once the fleet is whole."""
RETRIES = 60
"""A client that knows where else to ask, or waits for the one proxy there is."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="f", dir="/tmp"
    ) as path:  # the names of Ray's sockets must be short
        yield Path(path)


@pytest.fixture(scope="module")
def models(folder: Path) -> Models:
    return Models(folder)


@pytest.fixture(scope="module")
def reference(models: Models) -> Iterator[Reference]:
    """One engine for each version, in this process."""
    engines = Reference(models)
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def faults(models: Models, folder: Path) -> Iterator[tuple[Fleet, Faults]]:
    """Two replicas on this machine."""
    with Fleet(models.files, 2, folder / "ray") as fleet:
        yield fleet, Faults(models, fleet)


def under(
    begin: Callable[[], Whole],
    fleet: Fleet,
    reference: Reference | FeaturedReference,
    *urls: str,
    retries: int = 0,
    draw: Callable[[random.Random], tuple[str, dict[str, Any]]] = drawn,
) -> Counter[str]:
    """How the requests ended that were sent before a fault, during it, and when the fleet was whole again; none has a
    wrong answer."""
    with Callers(
        urls or [fleet.url], RATE, retries, deadline_ms=1e3 * LONG_S, timeout_s=LONG_S, draw=draw
    ) as callers:
        assert until(lambda: callers.have(BEFORE), LONG_S) is not None
        whole = begin()
        assert until(whole, LONG_S) is not None, (fleet.served(), outcomes(callers.calls))
        enough = len(callers.calls) + AFTER
        assert until(lambda: callers.have(enough), LONG_S) is not None
    assert reference.wrong(callers.calls) == []
    lost = [call.answer for call in callers.calls if call.outcome != "ok"]
    assert not lost, lost[:3]
    return outcomes(callers.calls)


@pytest.mark.parametrize(
    ("fault", "retries"),
    [
        (Faults.slow_replica, 0),
        (Faults.hanging_replica, 0),
        (Faults.killed_proxy, RETRIES),
        (Faults.killed_coordinator_then_replica, 0),
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_nothing_is_lost_on_one_machine(
    faults: tuple[Fleet, Faults], reference: Reference, fault: Callable[[Faults], Whole], retries: int
) -> None:
    """A replica at a tenth of its speed, one that hangs, the one proxy for clients that try again, and the coordinator
    and then a replica: the one in its place serves the catalog that was uploaded."""
    fleet, done = faults
    found = under(lambda: fault(done), fleet, reference, retries=retries)
    assert found["ok"] >= BEFORE + AFTER
    assert len(fleet.served()) == fleet.replicas and len(set(fleet.served().values())) == 1


@pytest.fixture(scope="module")
def features() -> Iterator[tuple[Featured, Fleet, FeaturedReference]]:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as path, Featured(Path(path)) as featured:
        engines = featured.reference()
        with Fleet(featured.files, 2, Path(path) / "ray") as fleet:
            yield featured, fleet, engines
        engines.close()


def test_without_the_feature_store_every_request_is_answered(
    features: tuple[Featured, Fleet, FeaturedReference],
) -> None:
    """An answer says how many items lack features: so many, and no others, have the score that they have without."""
    featured, fleet, engines = features
    under(lambda: featured.gone_and_back(fleet), fleet, engines, draw=fleet_features.drawn)
    assert engines.without_features > 0, "some were asked while Redis was gone"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, Fleet, NodeFaults, Reference]]:
    """A replica, a front and a proxy on each of two nodes; clients know both proxies."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as path:
        own = Models(Path(path))
        with Nodes(own, Path(path)) as nodes, nodes.fleet("fleet.fronts=2") as fleet:
            engines = Reference(own)
            yield nodes, fleet, NodeFaults(own, fleet, nodes), engines
            engines.close()


@pytest.mark.namespaces
@pytest.mark.parametrize(
    "fault",
    [
        NodeFaults.cut,
        NodeFaults.killed_gcs,
        NodeFaults.killed_proxy,
        NodeFaults.another_jgr,
    ],
    ids=lambda each: each.__name__,
)
def test_nothing_is_lost_between_two_nodes(
    nodes: tuple[Nodes, Fleet, NodeFaults, Reference], fault: Callable[[NodeFaults], Whole]
) -> None:
    """Nothing goes from one to the other for some seconds; the head's storage is killed and starts again from Redis;
    one of two proxies dies; a replica is refused since its node has another jgr by then."""
    world, fleet, done, engines = nodes
    before = set(fleet.served().values())
    found = under(lambda: fault(done), fleet, engines, *world.urls, retries=RETRIES)
    assert found["ok"] >= BEFORE + AFTER
    assert set(fleet.served().values()) == before and len(fleet.served()) == fleet.replicas


@pytest.mark.namespaces
def test_a_reload_that_meets_a_bad_node_goes_back(
    nodes: tuple[Nodes, Fleet, NodeFaults, Reference],
) -> None:
    """The second node's folder of the new version is empty; /v1/models tells where it failed, and who went back."""
    world, fleet, done, engines = nodes
    before = fleet.served()
    under(done.bad_node, fleet, engines, *world.urls, retries=RETRIES)

    def last() -> dict[str, Any]:
        found: dict[str, Any] = fleet.ask("GET", "/v1/models")[1]["rollout"]
        return found

    assert until(lambda: last()["back"] == last()["done"]) is not None, last()
    told = last()
    assert (told["state"], told["path"], told["of"]) == ("failed", "/v1/models/jgr/reload", 2)
    assert told["replica"] in before and told["replica"] not in told["done"]
    assert told["error"].startswith(f"replica {told['replica']}: ")
    assert fleet.served() == before
