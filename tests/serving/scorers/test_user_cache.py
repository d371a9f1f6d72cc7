# SPDX-License-Identifier: Apache-2.0
"""Users' states on the page pool: what is written is what is read, in place, page by page, and a pool that is lost."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.cache import pool as pools
from jgr.cache.entries import Stored
from jgr.cache.pool import StatePool
from jgr.config import ConfigError
from jgr.serving.policies.user_cache import Found, UserCache, UserPart


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> StatePool:
    """Of 13 pages, three a user: 18, 1300 and 40 bytes, each from a multiple of 256 on, take 2048."""
    monkeypatch.setattr(pools, "PAGE_BYTES", 800)
    return StatePool(state(0), 13 * 768 / 2**20)


def state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "kv": jnp.asarray(rng.normal(size=(1, 13, 25)), jnp.float32),
        "rows": jnp.asarray(rng.integers(-5, 5, (1, 10)), jnp.int32),
        "half": jnp.asarray(rng.normal(size=(1, 9)), jnp.bfloat16),
    }


def place(*pages: int, generation: int = 0) -> Stored:
    return Stored(np.array(pages, np.int32), generation, True)


def equal(found: Any, expected: Any) -> bool:
    assert found is not None and found.keys() == expected.keys()
    return all(
        found[name].dtype == expected[name].dtype and (found[name] == expected[name]).all()
        for name in expected
    )


def test_states_are_read_as_they_were_written_wherever_their_pages_are(pool: StatePool) -> None:
    assert (pool.pages, pool.pages_per_user) == (13, 3)
    places = [place(5, 0, 12), place(1, 11, 3), place(2, 4, 6)]
    for seed, at in enumerate(places):
        assert pool.store(state(seed), at)
    assert pool.store(state(7), places[1])
    for seed, at in zip((0, 7, 2), places, strict=True):
        assert equal(pool.load(at), state(seed))


def test_the_pool_is_written_in_place(pool: StatePool) -> None:
    write, _ = pool.compile()
    memory = write.memory_analysis()
    size = 13 * 768
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes == size
    assert memory.temp_size_in_bytes < size


def test_a_pool_that_fails_is_emptied_and_what_was_planned_for_it_is_not_done(
    pool: StatePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = UserCache(pool, 512)
    block = np.arange(512).astype(np.uint8)
    found = cache.find(UserPart("u", block))
    assert found is not None and found.place.new
    pool.store(state(0), found.place)
    cache.end(found, well=True)
    again = cache.find(UserPart("u", block))
    assert again is not None and not again.place.new
    write, read = pool.compile()

    def broken(*given: Any) -> Any:
        raise ArithmeticError("the device is gone")

    pool._programs = broken, read  # type: ignore[assignment]
    assert not pool.store(state(1), place(1, 2, 3))
    pool._programs = write, read
    assert "is emptied" in caplog.text
    assert pool.load(again.place) is None and not pool.store(state(1), again.place)
    cache.end(again, well=False)
    cache.meta.check()
    assert (cache.meta.number("user"), cache.meta.pages.free) == (0, 13)
    anew = cache.find(UserPart("u", block))
    assert anew is not None and anew.place.new and anew.place.generation == 1
    assert pool.store(state(1), anew.place)
    cache.end(anew, well=True)
    assert equal(pool.load(anew.place), state(1))


def test_a_pool_without_room_for_one_user_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.device_mb"):
        StatePool(state(0), 0.001)


class Room:
    """Pages and no array."""

    def __init__(self, pages: int, pages_per_user: int) -> None:
        self.pages, self.pages_per_user, self.generation = pages, pages_per_user, 0


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
    room: Any = Room(max(pages, per_user), per_user)
    cache = UserCache(room, 256, longer if grows else None)
    held: list[tuple[Found, int, int, Any]] = []
    written: dict[tuple[int, ...], tuple[int, int, int]] = {}  # by pages: user, block, generation
    for what, user, block in events:
        if what == "find":
            found = cache.find(UserPart(str(user), np.full(256, block, np.uint8)))
            if found is not None:
                assert len(found.place.pages) == per_user
                if not found.place.new:
                    assert written[tuple(found.place.pages)] == (user, block, room.generation)
                source = None
                if found.before is not None:
                    source = written[tuple(found.before.pages)]
                    assert grows and source == (user, block - found.grown, room.generation)
                held.append((found, user, block, source))
        elif what == "end" and held:
            found, whose, of, source = held.pop(user % len(held))
            if found.before is not None:
                assert written[tuple(found.before.pages)] == source
            if found.place.new and block:
                written[tuple(found.place.pages)] = (whose, of, found.place.generation)
            cache.end(found, well=bool(block))
        elif what == "forget":
            cache.forget(str(user))
        elif what == "lose":
            room.generation += block > 1
        cache.meta.check()
    for found, *_ in held:
        cache.end(found, well=False)
    for user in range(4):
        cache.forget(str(user))
    assert cache.meta.pages.free == room.pages and cache.meta.pinned == 0
