# SPDX-License-Identifier: Apache-2.0
"""Users' states on the page pool: what is written is what is read, in place, page by page, and a pool that is lost."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.cache.entries import Stored
from jgr.cache.memory import Memory
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool, PoolLost, StateView
from jgr.config import ConfigError
from jgr.serving.policies.jobs import UserPart
from jgr.serving.policies.user_cache import Found, UserCache


@pytest.fixture
def states() -> StateView:
    """In 13 pages of 768 bytes: of 18, 1300 and 40 bytes, each from a multiple of 256 on, which take 2048."""
    return StateView(DevicePool(13, 768), state(0))


def state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "kv": jnp.asarray(rng.normal(size=(1, 13, 25)), jnp.float32),
        "rows": jnp.asarray(rng.integers(-5, 5, (1, 10)), jnp.int32),
        "half": jnp.asarray(rng.normal(size=(1, 9)), jnp.bfloat16),
    }


def place(*cells: int, epoch: int = 0) -> Stored:
    return Stored(cells, epoch, True)


def equal(found: Any, expected: Any) -> bool:
    assert found is not None and found.keys() == expected.keys()
    return all(
        found[name].dtype == expected[name].dtype and (found[name] == expected[name]).all()
        for name in expected
    )


def test_states_are_read_as_they_were_written_wherever_their_cells_are(states: StateView) -> None:
    assert states.room == Room(768, 3)
    places = [place(5, 0, 12), place(1, 11, 3), place(2, 4, 6)]
    for seed, at in enumerate(places):
        assert states.store(state(seed), at)
    assert states.store(state(7), places[1])
    for seed, at in zip((0, 7, 2), places, strict=True):
        assert equal(states.load(at), state(seed))


def test_small_states_share_a_page() -> None:
    states = StateView(DevicePool(2, 8192), state(0))
    assert states.room == Room(2048, 1)
    for cell in range(8):
        assert states.store(state(cell), place(cell))
    assert all(equal(states.load(place(cell)), state(cell)) for cell in range(8))


def test_the_pool_is_written_in_place_and_read_without_a_copy() -> None:
    states = StateView(DevicePool(10_000, 768), state(0))
    write, read = (program.memory_analysis() for program in states.compile())
    size = 10_000 * 768
    assert write.alias_size_in_bytes == write.output_size_in_bytes == size
    assert write.temp_size_in_bytes < size / 100 and read.temp_size_in_bytes < size / 100


def test_a_pool_that_fails_is_emptied_and_what_was_planned_for_it_is_not_done(
    states: StateView, caplog: pytest.LogCaptureFixture
) -> None:
    pool = states.pool
    cache = UserCache(CacheMeta(Pages(13, 768), {"user": states.room}))
    block = np.arange(512).astype(np.uint8)
    found = cache.find(UserPart("u", block.tobytes()))
    assert found is not None and found.place.new
    states.store(state(0), found.place)
    cache.end(found, well=True)
    again = cache.find(UserPart("u", block.tobytes()))
    assert again is not None and not again.place.new
    write, read = states.compile()

    def broken(*given: Any) -> Any:
        raise ArithmeticError("the device is gone")

    states._programs = broken, read  # type: ignore[assignment]
    assert not states.store(state(1), place(1, 2, 3))
    states._programs = write, read
    assert "is emptied" in caplog.text
    assert states.load(again.place) is None and not states.store(state(1), again.place)
    with pytest.raises(PoolLost):
        pool.read(lambda array: array, again.place.epoch)
    cache.end(again, well=False)
    cache.meta.renew(pool.epoch)
    cache.meta.check()
    assert (cache.meta.number("user"), cache.meta.pages.free) == (0, 13)
    anew = cache.find(UserPart("u", block.tobytes()))
    assert anew is not None and anew.place.new and anew.place.epoch == 1
    assert states.store(state(1), anew.place)
    cache.end(anew, well=True)
    assert equal(states.load(anew.place), state(1))


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.device_mb"):
        Memory(0.0001)


EVENTS = st.tuples(
    st.sampled_from(("find", "find", "find", "end", "end", "forget", "lose")),
    st.integers(0, 3),
    st.integers(0, 3),
)


def longer(old: Any, new: Any) -> int | None:
    """Blocks of one number, which is the events: by at most two more."""
    events = int(new[0]) - int(old[0])
    return events if 0 <= events <= 2 else None


@given(st.lists(EVENTS, max_size=40), st.integers(2, 9), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_page_is_lost_whatever_happens(
    events: list[tuple[str, int, int]], pages: int, per_user: int, grows: bool
) -> None:
    """An entry serves the user and the block that it was written for, and that alone; what a user is computed from is
    the user's with fewer events, and nobody writes over it until then."""
    pages, epoch = max(pages, per_user), 0
    meta = CacheMeta(Pages(pages, 8), {"user": Room(8, per_user)})
    cache = UserCache(meta, longer if grows else None)
    held: list[tuple[Found, int, int, Any]] = []
    written: dict[tuple[int, ...], tuple[int, int, int]] = {}  # by cells: user, block, epoch
    for what, user, block in events:
        if what == "find":
            meta.renew(epoch)  # as every plan begins
            found = cache.find(UserPart(str(user), np.full(256, block, np.uint8).tobytes()))
            if found is not None:
                assert len(found.place.cells) == per_user
                if not found.place.new:
                    assert written[found.place.cells] == (user, block, epoch)
                source = None
                if found.before is not None:
                    source = written[found.before.cells]
                    assert grows and source == (user, block - found.grown, epoch)
                held.append((found, user, block, source))
        elif what == "end" and held:
            found, whose, of, source = held.pop(user % len(held))
            if found.before is not None:
                assert written[found.before.cells] == source
            if found.place.new and block:
                written[found.place.cells] = (whose, of, found.place.epoch)
            cache.end(found, well=bool(block))
        elif what == "forget":
            cache.forget(str(user))
        elif what == "lose":
            epoch += block > 1
        cache.meta.check()
    for found, *_ in held:
        cache.end(found, well=False)
    for user in range(4):
        cache.forget(str(user))
    assert cache.meta.pages.free == pages and cache.meta.pinned == 0
