# SPDX-License-Identifier: Apache-2.0
"""The device's pool and the host tier below it: who may use it, how it is lost, and that no page is lost with it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.cache.entries import Content, Entry, Move, Name, Stored
from jgr.cache.host import HostTier
from jgr.cache.memory import Memory
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room, pieces
from jgr.cache.pool import DevicePool, PoolLost, StateView
from jgr.config import Config, ConfigError, override
from jgr.models import words
from jgr.models.words import Cells
from jgr.serving.policies.user_cache import WholeContent

PATIENCE_S = 30.0


def broken(array: Any) -> Any:
    raise ArithmeticError("the device is gone")


def plus_one(array: Any) -> Any:
    return array + np.uint32(1)


def test_a_failed_program_empties_the_pool_and_refuses_what_was_planned_before() -> None:
    pool = DevicePool(3, 64)
    pool.write(plus_one, 0)
    assert pool.read(lambda array: int(array.sum()), 0) == 3 * 16
    for use in (pool.read, pool.write):
        epoch = pool.epoch
        with pytest.raises(ArithmeticError):
            use(broken, epoch)
        assert pool.epoch == epoch + 1
        for late in (pool.read, pool.write):
            with pytest.raises(PoolLost, match=f"planned for epoch {epoch}"):
                late(plus_one, epoch)
    assert pool.read(lambda array: int(array.sum()), pool.epoch) == 0


def test_a_failure_that_is_told_twice_empties_the_pool_once() -> None:
    pool = DevicePool(3, 64)
    pool.lose(0, ArithmeticError())
    pool.write(plus_one, 1)
    pool.lose(0, ArithmeticError())
    assert pool.epoch == 1 and pool.read(lambda array: int(array[0, 0]), 1) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16, np.int8])
def test_runs_of_any_type_are_read_as_they_were_written(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(-100, 100, (2, 3, 8)).astype(np.float32)).astype(dtype)
    page, word = np.array([[4, 0, 2], [4, 1, 9]]), np.array([[0, 3, 8], [8, 0, 0]])
    array = words.write(jnp.zeros((5, 16), jnp.uint32), page, word, words.as_words(numbers))
    count = 8 * numbers.dtype.itemsize // 4
    found = words.seen_as(words.read(array, page, word, count), numbers.dtype)
    inside = page < 5
    assert (np.asarray(found)[inside] == np.asarray(numbers)[inside]).all()
    assert np.count_nonzero(np.asarray(array).any(1)) == 4, "a page that is not there is left out"


@given(st.integers(1, 400), st.integers(1, 8).map(lambda n: 64 * n), st.integers(512, 9000))
@settings(max_examples=200, deadline=None)
def test_something_large_is_cut_into_cells_that_waste_little(grains: int, grain: int, page: int) -> None:
    cells, each = pieces(grains, grain, page)
    assert cells * each >= grains > (cells - 1) * each and each * grain <= page
    if page >= 16 * grain and (grains >= 16 or grains * grain * 8 <= page):
        filled = page // (each * grain) * grains * grain / (cells * page)
        assert filled >= 0.85 or grains < 32


def test_what_a_plan_says_of_the_pool_is_plain_data() -> None:
    move = Move("to_host", "m/user", (3, 1), (0, 7))
    stored = Stored((4, 5), 2, True)
    assert msgspec.json.decode(msgspec.json.encode(move), type=Move) == move
    assert msgspec.json.decode(msgspec.json.encode(stored), type=Stored) == stored
    assert len({move, Move("to_host", "m/user", (3, 1), (0, 7))}) == 1


def test_cells_of_two_sizes_come_back_from_the_host_as_they_went() -> None:
    pool = DevicePool(6, 4096)
    tier = HostTier(pool, 4)
    small, large = Cells.of(256, 4096), Cells.of(3000, 4096)
    before = np.arange(6 * 1024, dtype=np.uint32).reshape(6, 1024)
    pool.write(lambda array: jax.device_put(jnp.asarray(before), pool.sharding), 0)
    numbers = tuple(range(16, 96))
    tier.plan(
        [Move("to_host", "s", numbers[:32], tuple(range(32))), Move("to_host", "l", (5,), (3,))], small, 0
    )
    tier._planned[-1] = (0, tier._planned[-1][1], large)
    tier.catch_up()
    pool.write(jnp.zeros_like, 0)
    tier.plan([Move("to_device", "s", (64, 0), (31, 0))], small, 0)
    tier.plan([Move("to_device", "l", (3,), (3,))], large, 0)
    tier.catch_up()
    after = pool.read(np.asarray, 0)
    assert (after[4, :64] == before[2, 15 * 64 :]).all() and (after[0, :64] == before[1, :64]).all()
    assert (after[3, :750] == before[5, :750]).all() and not after[3, 750:].any()
    assert np.count_nonzero(after) == np.count_nonzero(before[5, :750]) + 128


def test_moves_of_a_lost_pool_are_not_made() -> None:
    pool = DevicePool(2, 1024)
    tier, cells = HostTier(pool, 1), Cells.of(1024, 1024)
    tier.plan([Move("to_device", "m", (1,), (0,))], cells, 0)
    tier._array[:] = 7
    pool.lose(0, ArithmeticError())
    tier.catch_up()
    assert not pool.read(np.asarray, 1).any()


def test_a_state_is_written_after_what_leaves_its_cells_for_the_host() -> None:
    pool = DevicePool(2, 1024)
    tier, cells = HostTier(pool, 1), Cells.of(1024, 1024)
    pool.write(plus_one, 0)
    view = StateView(pool, jnp.zeros(256, jnp.float32), catch_up=tier.catch_up)
    tier.plan([Move("to_host", "m", (1,), (0,))], cells, 0)
    assert view.store(jnp.full(256, 2.5, jnp.float32), Stored((1,), 0, True))
    tier.plan([Move("to_device", "m", (0,), (0,))], cells, 0)
    tier.catch_up()
    assert (pool.read(np.asarray, 0)[0] == 1).all()
    state = view.load(Stored((1,), 0, False))
    assert state is not None and (np.asarray(state) == 2.5).all()


def test_a_copy_back_waits_for_copies_of_its_own_cells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the host waits for the programs in flight; who brings another entry back must not."""
    pool = DevicePool(6, 1024)
    tier, cells = HostTier(pool, 4), Cells.of(512, 1024)
    before = np.arange(6 * 256, dtype=np.uint32).reshape(6, 256)
    pool.write(lambda array: jax.device_put(jnp.asarray(before), pool.sharding), 0)
    tier.plan([Move("to_host", "u", (2, 3), (4, 5))], cells, 0)
    tier.catch_up()
    device, keep = threading.Event(), tier._keep

    def kept_late(*arguments: Any) -> None:
        assert device.wait(PATIENCE_S)
        keep(*arguments)

    tier._copies.submit(int).result()  # the copies so far have ended
    monkeypatch.setattr(tier, "_keep", kept_late)
    tier.plan([Move("to_host", "u", (6, 7), (6, 7)), Move("to_device", "u", (10, 11), (5, 4))], cells, 0)
    other = threading.Thread(target=tier.catch_up, daemon=True)
    other.start()
    other.join(PATIENCE_S / 3)
    assert not other.is_alive(), "it waited for a copy of other cells"
    halves = before.reshape(12, 128)
    assert (pool.read(np.asarray, 0)[5].reshape(2, 128) == halves[[3, 2]]).all()
    tier.plan([Move("to_device", "u", (0, 1), (7, 6))], cells, 0)
    own = threading.Thread(target=tier.catch_up, daemon=True)
    own.start()
    device.set()
    own.join(PATIENCE_S)
    assert (pool.read(np.asarray, 0)[0].reshape(2, 128) == halves[[7, 6]]).all()


@pytest.mark.parametrize("name", ["device", "host"])
def test_more_than_all_memory_is_refused_before_it_is_asked_for(name: str) -> None:
    for mb in (1e9, 1e14):
        sizes = {"device_mb": 1.0, f"{name}_mb": mb}
        with pytest.raises(ConfigError, match=rf"cache\.{name}_mb: .* MB are more than all memory"):
            _ = Memory(**sizes).pool


def test_models_divide_the_pool_by_their_shares() -> None:
    configs = [
        override(
            Config(), f"model.name={name}", "cache.policy=user", "cache.device_mb=1", f"cache.share={share}"
        )
        for name, share in (("a", 1), ("b", 3), ("c", 0))
    ]
    memory = Memory.of(*configs, override(Config(), "model.name=d"))
    assert memory.pages.page_bytes == 32 << 10 and memory.pages.count == 32
    assert (memory.limit("a"), memory.limit("b")) == (8, 24)
    assert sum(memory.parts(name)["pool"] for name in "abcd") == memory.pool.nbytes == 1 << 20
    with pytest.raises(ConfigError, match=r"cache\.share: model 'c' gets less than one page"):
        memory.limit("c")
    assert Memory.of(Config()).pages.count == 1, "nobody keeps anything"


def test_versions_of_the_same_weights_share_entries_and_another_revision_begins_empty() -> None:
    memory = Memory(1.0, shares={"m": 1.0})

    def make(revision: str) -> CacheMeta:
        return CacheMeta(memory.pages, {"user": Room(256, step=1)}, owner=f"m@{revision}")

    old = memory.lease("r1", lambda: make("r1"))
    name, content = Name("user", "u", "user_prefix"), Content.of(np.arange(3, dtype=np.int32))
    entry = old.held.extend(name, content)
    assert entry is not None
    old.held.written(entry)
    old.held.release(entry)
    again = memory.lease("r1", lambda: make("r1"))
    other = memory.lease("r2", lambda: make("r2"))
    old.close()
    old.close()
    assert again.held.find(name, content) is entry and other.held.find(name, content) is None
    memory.check()
    again.close()
    other.close()
    memory.check()
    assert memory.pages.free == memory.pages.count


KINDS = ("user", "item", "row")
EVENTS = st.tuples(
    st.sampled_from(("write", "write", "write", "end", "hold", "drop", "lose", "close", "limit")),
    st.integers(0, 1),
    st.sampled_from(KINDS),
    st.integers(0, 3),
    st.integers(1, 9),
)


@given(st.lists(EVENTS, max_size=60), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_free_and_used_are_all_pages_whatever_several_models_do(
    events: list[tuple[str, int, str, int, int]], count: int
) -> None:
    """Two models with cells of other sizes, entries that grow, are fixed, or are written while the pool is lost."""
    rooms = [
        {"user": Room(96, 2, 4), "item": Room(24, 1, 1), "row": Room(8)},
        {"user": Room(64, 1, 2), "item": Room(50, 3), "row": Room(100, 1, 1)},
    ]
    pages = Pages(count, 100)
    metas = [CacheMeta(pages, rooms[at], owner=f"m{at}") for at in (0, 1)]
    writing: list[tuple[CacheMeta, Entry]] = []
    held: list[tuple[CacheMeta, Entry]] = []
    epoch = 0
    for what, model, kind, who, length in events:
        meta, name = metas[model], Name(kind, who, "l")
        meta.renew(epoch)
        content: Any = (
            WholeContent(bytes([length])) if rooms[model][kind].step == 0 else Content.of(np.arange(length))
        )
        if what == "write" and (entry := meta.extend(name, content)) is not None:
            writing.append((meta, entry))
        elif what == "end" and writing:
            whose, entry = writing.pop(who % len(writing))
            (whose.written if length % 2 else whose.failed)(entry)
            whose.release(entry)
        elif what == "hold" and (entry := meta.find(name, content)) is not None:
            meta.hold(entry)
            held.append((meta, entry))
        elif what == "drop":
            meta.drop(name)
        elif what == "lose":
            epoch += 1
        elif what == "limit":
            meta.set_limit(kind, min(who, count))
        elif what == "close" and held:
            whose, entry = held.pop()
            whose.release(entry)
        for each in metas:
            each.check()
        cells: dict[int, list[tuple[int, int]]] = {}
        for at, each in enumerate(metas):
            for each_kind in KINDS:
                size = rooms[at][each_kind].bytes
                for entry in each._all(each_kind):
                    for cell in entry.cells:
                        page, place = divmod(cell, 100 // size)
                        cells.setdefault(page, []).append((place * size, place * size + size))
        assert pages.free + len(cells) == count, "a page is nobody's"
        for spans in cells.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "cells overlap"
    for whose, entry in writing:
        whose.failed(entry)
        whose.release(entry)
    for whose, entry in held:
        whose.release(entry)
    for meta in metas:
        meta.close()
    assert pages.free == count
