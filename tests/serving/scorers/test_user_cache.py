# SPDX-License-Identifier: Apache-2.0
"""Users' states on the page pool: what is written is what is read, in place, page by page, and a pool that is lost."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.cache.entries import Content, Stored
from jgr.cache.histories import MOST_CELLS, HistoryView, room_of
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


RNG = np.random.default_rng(5)
WINDOW, GROWTH = 7, 2
HISTORIES = {
    "pages share records": {"k": (2, 1, WINDOW, 3), "rows": (1, WINDOW), "number": (1,)},  # 28 bytes
    "a record has pages": {"k": (2, 1, WINDOW, 300), "rows": (1, WINDOW), "number": (1,)},  # 2404 bytes
}


def histories(of: str, growth: int = GROWTH, pages: int = 80, windows: tuple[int, ...] = ()) -> HistoryView:
    kept = {
        name: jax.ShapeDtypeStruct(shape, np.float32 if name == "k" else np.int32)
        for name, shape in HISTORIES[of].items()
    }
    along = {"k": -2, "rows": -1, "number": "number"}
    return HistoryView(DevicePool(pages, 768), kept, along, 2, growth, windows)


@pytest.mark.parametrize("of", HISTORIES)
def test_a_history_is_read_as_long_as_it_is_wherever_its_cells_are_and_grows_in_place(of: str) -> None:
    view = histories(of, windows=(3,))
    room = view.room
    free = RNG.permutation(80 * (768 // room.bytes)).tolist()
    held = dict[str, tuple[list[int], int, dict[str, Any]]]()
    for user, tokens in (("a", 1), ("b", 7), ("a", 3), ("c", 2), ("a", 4), ("c", 7), ("a", 4), ("b", 7)):
        cells, before, kept = held.get(user, ([], 0, {}))
        cells += [free.pop() for _ in range(room.of(tokens) - len(cells))]
        new = {
            "k": RNG.normal(size=HISTORIES[of]["k"]).astype(np.float32),  # behind the last token is anything
            "rows": RNG.integers(0, 99, HISTORIES[of]["rows"]).astype(np.int32),
            "number": np.array([99], np.int32),  # which is not written
        }
        first = max(before - 1, 0)
        if kept:
            new["k"][:, :, :first], new["rows"][:, :first] = kept["k"][:, :, :first], kept["rows"][:, :first]
            given = {name: value.copy() for name, value in new.items()}
            given["k"][:, :, :first], given["rows"][:, :first] = np.nan, 77  # what is there is not written
        else:
            given = new
        if tokens <= 3:
            given = given | {"k": given["k"][:, :, :3], "rows": given["rows"][:, :3]}
        assert view.store(jax.tree.map(jnp.asarray, given), Stored(tuple(cells), 0, True, tokens, before))
        held[user] = cells, tokens, new
        for its, count, wanted in held.values():
            for some, places in ((1, 3), (count, 3 if count <= 3 else WINDOW), (count, None)):
                found, width = view.load(Stored(tuple(its), 0, False, some), places), places or WINDOW
                assert found is not None
                valid = np.arange(width) < some
                np.testing.assert_array_equal(
                    found["k"], np.where(valid[:, None], wanted["k"][:, :, :width], 0)
                )
                np.testing.assert_array_equal(found["rows"], np.where(valid, wanted["rows"][:, :width], 0))
                assert found["number"].tolist() == [some]


def test_floating_numbers_of_a_history_are_held_in_8_bits_and_whole_ones_as_they_are() -> None:
    shapes, plain = HISTORIES["a record has pages"], histories("a record has pages")
    kept = {
        name: jax.ShapeDtypeStruct(x, np.float32 if name == "k" else np.int32) for name, x in shapes.items()
    }
    along = {"k": -2, "rows": -1, "number": "number"}
    view = HistoryView(DevicePool(8, 768), kept, along, 2, quantize="int8")
    assert (
        view.room == Room(608, 1, 1) and plain.room.bytes * plain.room.cells > 2404
    )  # a page has one record
    given = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    given["rows"] = RNG.integers(0, 99, shapes["rows"]).astype(np.int32)
    given["number"] = np.array([3], np.int32)
    place = Stored(tuple(range(view.room.of(3))), 0, True, 3)
    assert view.store(jax.tree.map(jnp.asarray, given), place)
    found = view.load(place)
    assert found is not None and found["number"].tolist() == [3]
    k, there = given["k"], (np.arange(WINDOW) < 3)
    np.testing.assert_array_equal(found["rows"], np.where(there, given["rows"], 0))
    step = np.abs(k).max(-1, keepdims=True) * (1 + 2**-7) / 127
    assert (np.abs(found["k"] - np.where(there[:, None], k, 0)) <= step / 2).all()
    assert np.abs(found["k"][..., :3, :] - k[..., :3, :]).max() > 1e-4


def test_a_history_is_written_in_place_by_as_many_tokens_as_are_new() -> None:
    view = histories("pages share records", pages=10_000)
    size = 10_000 * 768
    read, few, whole = (program.memory_analysis() for program in view.compile())
    assert few.alias_size_in_bytes == whole.alias_size_in_bytes == size
    assert max(x.temp_size_in_bytes for x in (read, few, whole)) < size / 100
    still = histories("pages share records", 0)
    still.compile()
    assert [list(of._programs[WINDOW].writes) for of in (view, still)] == [[GROWTH + 1, WINDOW], [WINDOW]]


@given(
    st.integers(1, 300).map(lambda n: 4 * n), st.sampled_from([256, 768, 1024]), st.integers(1, 2000),
    st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_a_history_takes_the_cells_of_its_tokens(record: int, page: int, longest: int, wanted: int) -> None:
    room = room_of(record, page, longest, wanted)
    assert room.bytes <= page and room.bytes * room.cells >= record * room.step
    assert room.step == 1 or room.cells == 1
    assert room.step <= max(wanted, -(-longest // MOST_CELLS)) and room.step <= longest
    if record <= page:
        held = page // room.bytes * room.step * record
        assert held >= 0.5 * page or record > page / 2  # no worse than one record a cell
    for tokens in (1, longest // 2 + 1, longest):
        assert (room.of(tokens) - room.cells) * room.step < tokens * room.cells <= room.of(tokens) * room.step


def test_the_longest_histories_have_cells_that_can_be_counted() -> None:
    assert room_of(2048, 2 << 20, 200, 2) == Room(4096, 1, 2)
    assert room_of(2048, 2 << 20, 16384, 2) == Room(64 * 2048, 1, 64)
    assert room_of(300, 1024, 6, 2) == Room(300, 1, 1)  # cells of two would leave two fifths of a page
    assert room_of(2404, 768, 6, 2) == Room(256, 10, 1)


EVENTS = st.tuples(
    st.sampled_from(("find",) * 9 + ("write",) * 6 + ("end",) * 9 + ("forget", "lose", "limit")),
    st.integers(0, 2),
    st.integers(0, 5),
)


class Machine:
    """The cells as a device has them, and what runs in flight do: read at once and at their end, write in between."""

    def __init__(self, pages: int, room: Room, growth: int) -> None:
        self.meta = CacheMeta(Pages(pages, 8 * room.cells), {"user": room})
        self.cache = UserCache(self.meta, lambda key: Content.of(np.frombuffer(key, np.int32)), growth)
        self.room, self.growth, self.epoch = room, growth, 0
        self.held: list[tuple[Found, tuple[int, ...], bool]] = []  # the history, and whether it was written
        self.records: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # by cell and place in it: the events so far

    def read(self, at: Stored, history: tuple[int, ...]) -> None:
        if at.epoch == self.epoch:
            assert [self.records[self._at(at, n)] for n in range(at.tokens)] == [
                history[: n + 1] for n in range(at.tokens)
            ]

    def write(self, at: Stored, history: tuple[int, ...]) -> None:
        if at.epoch == self.epoch:
            for n in range(max(at.first - 1, 0), at.tokens):
                self.records[self._at(at, n)] = history[: n + 1]

    def _at(self, at: Stored, n: int) -> tuple[int, int]:
        return at.cells[n // self.room.step * self.room.cells], n % self.room.step

    def reads(self) -> None:
        for found, history, _ in self.held:
            if found.place is not None and not found.place.new:
                assert found.place.tokens == len(history) and found.before is None
                self.read(found.place, history)
            if found.before is not None:
                assert 0 < found.grown <= self.growth
                assert found.before.tokens == len(history) - found.grown
                self.read(found.before, history)


@given(
    st.lists(EVENTS, min_size=30, max_size=50),
    st.integers(1, 9),
    st.sampled_from([Room(8, 1, 1), Room(8, 1, 3), Room(8, 2, 1)]),
    st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_whoever_reads_a_kept_user_reads_its_events_whatever_others_write(
    events: list[tuple[str, int, int]], pages: int, room: Room, growth: int
) -> None:
    """Users ask with more and with fewer events, and with others; several at a time, of which some fail before and some
    after they have written. An entry holds the cells of its tokens, and nobody's are lost."""
    machine = Machine(pages, room, growth)
    cache, meta, held = machine.cache, machine.meta, machine.held
    for what, user, number in events:
        if what == "find":
            meta.renew(machine.epoch)  # as every plan begins
            other = number == 5  # the user has another history
            history = tuple(100 * user + 50 * other + n for n in range(3 if other else number))
            found = cache.find(UserPart(str(user), np.array(history, np.int32).tobytes()))
            if found is not None:
                held.append((found, history, False))
        elif what in ("write", "end") and held:
            found, history, written = held.pop(number % len(held))
            if found.place is not None and found.place.new and not written and (what == "write" or user):
                machine.write(found.place, history)
                written = True
            if what == "write":
                held.append((found, history, written))
            else:
                new = found.place is not None and found.place.new
                cache.end(found, well=user > 0 and (written or not new))
        elif what == "forget":
            cache.forget(str(user))
        elif what == "limit":
            meta.set_limit("user", min(number, pages))
        elif what == "lose":
            machine.epoch += number > 3
        meta.check()
        machine.reads()
        for entry in meta._all("user"):
            assert len(entry.cells) == room.of(len(entry.growing) if entry.growing else entry.tokens)
    for found, *_ in held:
        cache.end(found, well=False)
    for user in range(3):
        cache.forget(str(user))
    assert meta.pages.free == pages and meta.pinned == 0
