# SPDX-License-Identifier: Apache-2.0
"""The section of the configuration that a fleet on Ray Serve reads; see `jgr.config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jgr.fields import check, require


@dataclass(frozen=True)
class FleetConfig:
    """Replicas of the server on Ray Serve, `jgr cluster`, and how requests find one. See docs/fleet.md."""

    replicas: int = 2  # replicas, each with all of the models; one device is for one replica
    min_replicas: int = 1  # the fewest replicas that there are, where fleet.max_replicas is set
    # The most replicas: their number begins with fleet.replicas and follows the wait that is predicted. 0: it stays
    # fleet.replicas
    max_replicas: int = 0
    target_wait_ms: float = 100.0  # a request should wait for its turn at most so long, by what is predicted
    # How a replica is chosen. joint: by what its caches save of the prompt, less how much more it has to do than the
    # mean. The others are baselines. hit: by its caches alone; load: by tokens in flight; least: by requests in flight;
    # hash: by the user's name, unless it has too much to do.
    # matched: by the share of the candidates that it holds, less fleet.load times how much more it has to do than the
    # mean (RcLLM); rcllm: the same with its work as a share of a second's, as the paper has it. hlem: by the user whom
    # it keeps, the embedding rows of the user's history that it holds, and its work, each by what it costs (HLEM).
    routing: Literal[
        "joint", "hit", "load", "least", "round_robin", "random", "hash", "matched", "rcllm", "hlem"
    ] = "joint"
    report_s: float = 0.2  # seconds between what a replica reports of its caches and its work
    digest_bits: int = 16  # size of the filters in a report, as a power of two of bits
    load: float = 0.7  # weight of the load in the scores of joint, matched and rcllm
    share: float = 0.2  # weight, in the joint score, of how much of the work a replica has got lately
    affinity: float = 0.05  # what the replica that had the user last gets more, as a share of a whole prompt
    attempts: int = 3  # to how many replicas a request is sent, where they die or are silent
    # A request that takes so many times what it should is sent to a second replica too, and the first answer counts; at
    # most one in twenty is. 0: a request waits for its replica, as long as that lives
    hedge: float = 4.0
    # Fronts, each of which reads requests and routes by its own bookings. Ray runs a proxy on every node, which prefers
    # the fronts of its node
    fronts: int = 1
    cpus: float = 1.0  # cores that Ray keeps for a replica
    # GPUs that Ray keeps for a replica; each replica sees no other. At least model.tensor_parallel, and at least
    # data_parallel.devices.
    gpus: float = 0.0
    # Seconds between questions after the health of a replica, a front or the coordinator; replicas and fronts then read
    # a changed server.keys. Who leaves three unanswered is replaced, and fronts and the coordinator have 5 s at least
    # for each.
    health_s: float = 2.0
    # Where the keys and values of the catalog's items are held, in the replicas' host memory. none: where they were
    # computed; replicate: the hottest on every replica; hash: each on one; hrcs: the hottest on every replica, as many
    # as the links need, the others on one; similarity: the hottest on every replica, the others on one, together
    # with those that the same requests ask for. Needs a cache.policy that keeps items: item,
    # cache_agnostic, hotness or blocks.
    items: Literal["none", "replicate", "hash", "hrcs", "similarity"] = "none"
    hot: float = 0.001  # similarity: the share of the items that every replica holds
    items_mb: float = 256.0  # memory of a replica for the items that it is to hold, in MiB
    fetched_mb: float = 32.0  # and for items that it got from others, which go when room is needed
    keep_fetched: bool = True  # whether what was got from another replica is kept after the request
    # A missing item is fetched from the replica that holds it where that is cheaper than to compute it, always, or
    # never.
    fetch: Literal["cheaper", "always", "never"] = "cheaper"
    fetch_ms: float = 50.0  # longest time that a request waits for items of other replicas
    # How items' bytes go from replica to replica. auto: through shared memory on one machine, else over sockets; nixl:
    # by NIXL, which takes RDMA where there is some.
    transport: Literal["auto", "socket", "nixl"] = "auto"
    # Address on which a replica gives its items to others; node: the one by which Ray knows its machine, which several
    # machines need.
    items_host: str = "127.0.0.1"
    alpha: float = 0.2  # hrcs: the share of the prefill time that fetches may take
    link_gbit: float = 0.0  # hrcs: speed of the links between replicas, in Gb/s; 0: as it was measured
    refresh_s: float = 3600.0  # seconds between two placements, by how often items were asked for since
    items_window_s: float = 3600.0  # length of the window in which items' requests are counted, in seconds
    kv: str = (
        ""  # folder of items' keys and values that `jgr kv build` made; empty: replicas compute their share
    )

    def __post_init__(self) -> None:
        check(
            self, items_mb=0, fetched_mb=0, fetch_ms=0, alpha=0, link_gbit=0, refresh_s=0.1, items_window_s=1
        )
        require(self.alpha <= 1, f"fleet.alpha must be at most 1, not {self.alpha}")
        check(
            self,
            replicas=1,
            min_replicas=1,
            max_replicas=0,
            target_wait_ms=1,
            report_s=0.05,
            digest_bits=10,
            load=0,
            share=0,
            affinity=0,
            hot=0,
            attempts=1,
            hedge=0,
            fronts=1,
            cpus=0,
            gpus=0,
        )
        check(self, health_s=0.5)
        largest = max(self.replicas, self.max_replicas)
        require(largest <= 1000, f"fleet.replicas and max_replicas must be at most 1000, not {largest}")
        require(bool(self.items_host), "fleet.items_host must not be empty: that would be every address")
        require(self.hot <= 1, f"fleet.hot must be at most 1, not {self.hot}")
        require(self.digest_bits <= 20, f"fleet.digest_bits must be at most 20, not {self.digest_bits}")
        require(self.attempts <= 16, f"fleet.attempts must be at most 16, not {self.attempts}")
        require(self.fronts <= 100, f"fleet.fronts must be at most 100, not {self.fronts}")
        few, most = self.min_replicas, self.max_replicas
        bounds = (
            f"fleet.replicas must be from min_replicas, {few}, to max_replicas, {most}, not {self.replicas}"
        )
        require(not most or few <= self.replicas <= most, bounds)
        fixed = f"fleet.min_replicas, {few}, is more than the {self.replicas} of fleet.replicas, and max_replicas is 0"
        require(bool(most) or few <= self.replicas, fixed)
        hedge = f"fleet.hedge must be 0 or at least 1, not {self.hedge}"
        require(self.hedge == 0 or self.hedge >= 1, hedge)
