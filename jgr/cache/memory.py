# SPDX-License-Identifier: Apache-2.0
"""One process's cache memory, above the models: the pool, its pages, the host tier, and who holds a part of them.

The one idea: a model's versions come and go, and what was computed with the same weights stays valid. So the meta
service of a model belongs to no engine. Engines of the same model and revision lease one, and the last to give it back
frees its pages; another revision has an empty one of its own.

A model's share is a number of pages, so moving a border moves none. While two revisions serve, both may want the
model's pages: the new one gets what is free until the old one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import jax

from jgr.cache.device_reads import DeviceReads, make_reads
from jgr.cache.host import HostTier
from jgr.cache.pages import Pages
from jgr.cache.pool import DevicePool, ReplicatedPool
from jgr.config import Config, ConfigError
from jgr.models.devices import Devices
from jgr.models.replicated import Replicated
from jgr.models.room import host_bytes

PAGE_BYTES, CPU_PAGE_BYTES, SMALLEST_PAGE_BYTES = 2 << 20, 64 << 10, 1 << 10
FEWEST_PAGES = 32
"""The fewest pages that a pool has: a small pool has smaller pages."""


class Holder(Protocol):
    """What holds pages of the pool: a meta service (`CacheMeta`), or the rows of embeddings (`Border`)."""

    def renew(self, epoch: int) -> None: ...

    def close(self) -> None:
        """Give all pages back."""

    def check(self) -> None:
        """Audit; AssertionError."""


H = TypeVar("H", bound=Holder)


@dataclass(eq=False)
class _Held:
    held: Any
    leases: int = 0


class Lease(Generic[H]):
    """A part in what holds pages, held by one engine."""

    def __init__(self, memory: Memory, key: Hashable, held: H) -> None:
        self.held, self._memory, self._key = held, memory, key
        self._open = True

    def again(self) -> Lease[H]:
        """Another part in the same, for who reads from it and may end after the engine. Only of an open one."""
        return self._memory.lease(self._key, lambda: self.held)

    def close(self) -> None:
        """Give the part back. Further calls do nothing."""
        if self._open:
            self._open = False
            self._memory._end(self._key)


class Memory:
    """device_mb, host_mb: the sizes. items_mb: of the host memory beyond that, for items that come from a folder, or
    from nodes of a fleet that hold them for each other; the first model that can has all of it. page_kb: 0 for the
    default. shares: the weight of each model, by name.

    devices: those that share each model; device_mb is of each, host_mb of all. replicated: those that each have the
    whole of it and a pool of its own, of device_mb; 1: not so. reads_by: see data_parallel.reads.

    The arrays are made when the first model asks for them, which raises ConfigError where one is larger than the memory
    that it would lie in. ConfigError where the pool has not one page.
    """

    def __init__(
        self,
        device_mb: float,
        host_mb: float = 0.0,
        page_kb: int = 0,
        shares: Mapping[str, float] | None = None,
        devices: int = 1,
        items_mb: float = 0.0,
        replicated: int = 1,
        reads_by: str = "",
    ) -> None:
        self._mb, self._devices, self._replicated = (device_mb, host_mb + items_mb), devices, replicated
        self._reads_by = reads_by
        size = int(device_mb * 2**20)
        self._page_bytes = page_kb << 10 or _page_bytes(size)
        self._count = size // self._page_bytes
        self._host_count, self._item_count = (
            int(mb * 2**20) // (devices * self._page_bytes) for mb in (host_mb, items_mb)
        )
        if self._count < 1:
            page_mb = self._page_bytes / 2**20
            raise ConfigError(f"cache.device_mb: {device_mb} is less than a page of {page_mb:.3g} MB")
        self._shares = dict(shares or {})
        self._held: dict[Hashable, _Held] = {}
        self._shares_items = ""
        self._lock = threading.Lock()  # a version is loaded in a thread of its own

    @classmethod
    def of(cls, *configs: Config) -> Memory:
        """The memory of a server, of the sizes in its first configuration. Where no model caches it is one page."""
        first, fleet, devices = configs[0].cache, configs[0].fleet, configs[0].model.tensor_parallel
        items_mb = fleet.items_mb + fleet.fetched_mb if fleet.items != "none" else 0.0
        if first.kv and not items_mb:
            items_mb = first.kv_mb
        shares = {config.model.name: config.cache.share for config in configs if caches(config)}
        replicated, by = configs[0].data_parallel.devices, configs[0].data_parallel.reads
        if replicated > 1 and devices > 1:
            raise ConfigError(
                "data_parallel.devices: devices have a whole model each, or share it by model.tensor_parallel"
            )
        if not shares:
            return cls(1 / 16, page_kb=64, devices=devices, replicated=replicated)
        return cls(first.device_mb, first.host_mb, first.page_kb, shares, devices, items_mb, replicated, by)

    def devices_of(self, config: Config) -> Devices:
        """The devices that share a model. ConfigError where they are not there, or other models have other ones."""
        count = config.model.tensor_parallel
        if count != self._devices:
            raise ConfigError(
                f"model.tensor_parallel: {count} for model {config.model.name!r}, but {self._devices} for the server's "
                "first: all models of a server are shared by equally many devices"
            )
        replicated = config.data_parallel.devices
        if replicated != self._replicated:
            raise ConfigError(
                f"data_parallel.devices: {replicated} for model {config.model.name!r}, but {self._replicated} for the "
                "server's first: all models of a server are on equally many devices"
            )
        return self.devices

    @cached_property
    def devices(self) -> Devices:
        """The devices of each model. ConfigError where they are not there."""
        return Replicated.of(self._replicated) if self._replicated > 1 else Devices.of(self._devices)

    @cached_property
    def pool(self) -> DevicePool:
        for name, mb, most in zip(("device", "host"), self._mb, (_device_bytes(), host_bytes()), strict=True):
            if mb * 2**20 > most:
                field = (
                    "host_mb, cache.kv_mb and fleet.items_mb"
                    if name == "host" and self._item_count
                    else f"{name}_mb"
                )
                raise ConfigError(f"cache.{field}: {mb:g} MB are more than all memory, {most / 2**20:.0f} MB")
        kind = ReplicatedPool if self._replicated > 1 else DevicePool
        return kind(self._count, self._page_bytes, self.devices)

    @cached_property
    def reads(self) -> DeviceReads | None:
        """The copies between the pools of devices; None where there is one pool."""
        return make_reads(self._reads_by, self.pool) if isinstance(self.pool, ReplicatedPool) else None

    @property
    def pages(self) -> Pages:
        return self.pages_of[0]

    @cached_property
    def pages_of(self) -> tuple[Pages, ...]:
        """The pages of each device that has a pool of its own."""
        return tuple(Pages(self._count, self._page_bytes) for _ in range(self._replicated))

    @cached_property
    def host(self) -> HostTier | None:
        """The host tier; None where neither host_mb nor items_mb holds a page."""
        pages = self._host_count, self._item_count
        return HostTier(self.pool, *pages) if any(pages) else None

    def holds_items(self, model: str) -> bool:
        """Whether this model's items are those that the nodes of a fleet hold for each other."""
        if self._item_count and not self._shares_items:
            self._shares_items = model
        return self._shares_items == model != ""

    def limit(self, model: str) -> int:
        """Pages of the pool that a model may hold. ConfigError where its share is not one page, or where it has none,
        since it cached nothing when the memory was made."""
        if model not in self._shares:
            raise ConfigError(
                f"cache.policy: model {model!r} wants a cache by now, and had none when this server started, which set "
                "no memory aside for it: start the server again"
            )
        every = sum(self._shares.values())
        pages = int(self._count * self._shares[model] / every) if every else 0
        if pages < 1:
            raise ConfigError(f"cache.share: model {model!r} gets less than one page of {self._count}")
        return pages

    def lease(self, key: Hashable, make: Callable[[], H]) -> Lease[H]:
        """The holder of a key that names model and revision; made where nobody holds it."""
        with self._lock:
            of = self._held.get(key)
            if of is None:
                of = self._held[key] = _Held(make())
                of.held.renew(self.pool.epoch)
            of.leases += 1
            return Lease(self, key, of.held)

    def _end(self, key: Hashable) -> None:
        with self._lock:
            held = self._held[key]
            held.leases -= 1
            if not held.leases:
                del self._held[key]
                held.held.close()

    def parts(self, model: str) -> dict[str, int]:
        """Bytes of the pool and of the host tier that count as a model's; those of all models are all of them."""
        if model not in self._shares:
            return {"pool": 0, "host_tier": 0}
        part = self._shares[model] / (sum(self._shares.values()) or 1)
        host = 0 if self.host is None else self.host.nbytes
        return {"pool": round(self.pool.nbytes * part), "host_tier": round(host * part)}

    def check(self) -> None:
        """Audit: pages free and used are all, whichever model holds them. AssertionError."""
        for held in self._held.values():
            held.held.check()
        if not self._held:
            free = [pages.free for pages in self.pages_of]
            assert free == [self._count] * len(free), "pages are held by nobody"


def caches(config: Config) -> bool:
    """Whether a model of this configuration keeps anything in the pool."""
    users = config.executors.share_user == "cache"
    return config.cache.policy != "none" or users or config.embeddings.tables == "paged"


def _device_bytes() -> int:
    return int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", host_bytes()))


def _page_bytes(size: int) -> int:
    most = CPU_PAGE_BYTES if jax.default_backend() == "cpu" else PAGE_BYTES
    return max(SMALLEST_PAGE_BYTES, min(most, 1 << max(0, (size // FEWEST_PAGES).bit_length() - 1)))


def tree_bytes(*trees: object) -> int:
    """Bytes of all arrays in some trees."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(trees))
