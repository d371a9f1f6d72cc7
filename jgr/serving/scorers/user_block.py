# SPDX-License-Identifier: Apache-2.0
"""What a scorer's programs are given, as the host writes it and as the device reads it (FLAME-6, FLAME-14).

The one idea: all that a request says of its user is one block of fixed size, assembled once. It is copied into the
buffers of the request's parts in one piece, and its bytes are what a cached user is known by: whatever a model reads of
a user is in there, and what it does not read is not; but for the time of the request, where what is kept of a user does
not depend on it (`known_by`).

Letters: S history places, C contextual slots, m candidates of a part; one user to a program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.buffers import BufferLayout
from jgr.features.schema import Schema
from jgr.features.unpacking import unpack_records
from jgr.models.scorers import Candidates, Needs, Users

UInt8 = npt.NDArray[np.uint8]


def user_layout(needs: Needs) -> BufferLayout:
    """The layout of a user's block, which has what the model reads of these int32 arrays.

    rows, actions, times: [S]; now: [1]; context: [C]; scenario: [1].
    """
    history, one = (needs.max_items,), (1,)
    read = {
        "rows": (history, True),
        "actions": (history, needs.actions > 0),
        "times": (history, needs.timed),
        "now": (one, needs.timed),
        "context": ((len(needs.slots),), bool(needs.slots)),
        "scenario": (one, needs.scenarios > 1),
    }
    return BufferLayout.of({name: (shape, np.int32) for name, (shape, used) in read.items() if used})


def part_layout(
    user: BufferLayout | None, schema: Schema | None, size: int, repeats: bool = False
) -> BufferLayout:
    """The layout of a part's buffer.

    It has the candidates' rows [m], their records where there is a schema, their ages [m] where `repeats` says that the
    model reads them, and the user's block where `user` is given.
    """
    inputs: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {"candidates": ((size,), np.int32)}
    if schema is not None:
        inputs["records"] = ((size, schema.record_bytes // 4), np.uint32)
    if repeats:
        inputs["ages"] = ((size,), np.int32)
    if user is not None:
        inputs["user"] = ((user.size // 4,), np.uint32)
    return BufferLayout.of(inputs)


def new_block(layout: BufferLayout) -> tuple[UInt8, dict[str, npt.NDArray[Any]]]:
    """An empty user's block, and its arrays to be written to.

    They are zeros, but -1 stands for no event and for no value of a slot.
    """
    block = np.zeros(layout.size, np.uint8)
    views = layout.views(block)
    for name in views.keys() & {"rows", "context"}:
        views[name][:] = -1
    return block, views


def known_by(layout: BufferLayout, needs: Needs, block: UInt8) -> UInt8:
    """The bytes by which a kept user is recognised: its block, with `now` only where what is kept depends on it."""
    if needs.dated or not needs.timed:
        return block
    key = block.copy()
    layout.views(key)["now"][:] = 0
    return key


class UserContent:
    """What a kept user is computed from, as long as what is kept of it: see `jgr.cache.entries.Valued`.

    layout: of the block. key: its bytes, see `known_by`. slots: tokens before the events. most: tokens of the longest
    user. grows: whether what is kept of the first events is the first of what is kept of all; else it is reused whole
    or not at all.
    """

    def __init__(self, layout: BufferLayout, slots: int, most: int, grows: bool, key: bytes) -> None:
        views = layout.views(np.frombuffer(key, np.uint8))
        self._events = [views.pop(name) for name in ("rows", "actions", "times") if name in views]
        self._others = b"".join(view.tobytes() for view in views.values())
        self._grows = grows
        self._length = min(slots + int((self._events[0] >= 0).sum()), most)
        self.digest = self.prefix(self._length) if grows else _digest(key)

    def __len__(self) -> int:
        return self._length

    def prefix(self, count: int) -> bytes:
        """The hash of the first `count` events, and of all else; b"", which is nobody's, where users do not grow."""
        if not self._grows:
            return self.digest if count == self._length else b""
        return _digest(self._others, *(view[:count].tobytes() for view in self._events))


def _digest(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.digest()


def read_users(layout: BufferLayout, needs: Needs, words: jax.Array) -> Users:
    """Read one user, [1, ...] each, from the words of a block; what the model does not read is zeros."""
    given = layout.unpack(words)
    history = jnp.zeros((1, needs.max_items), jnp.int32)

    def of(name: str, default: jax.Array) -> jax.Array:
        return given[name].reshape(default.shape) if name in given else default

    return Users(
        rows=of("rows", history),
        actions=of("actions", history),
        times=of("times", history),
        now=of("now", jnp.zeros(1, jnp.int32)),
        context=of("context", jnp.zeros((1, len(needs.slots)), jnp.int32)),
        scenario=of("scenario", jnp.zeros(1, jnp.int32)),
    )


def read_candidates(inputs: Mapping[str, jax.Array], needs: Needs, schema: Schema | None) -> Candidates:
    """One user's candidates, [1, m, ...], with the features that the model reads; none without a schema."""
    features: dict[str, jax.Array] = {}
    if schema is not None:
        of = unpack_records(schema, inputs["records"])
        features = {name: of[name][None] for name, _ in needs.features}
    ages = inputs["ages"][None] if needs.repeats else None
    return Candidates(inputs["candidates"][None], features, ages)
