# SPDX-License-Identifier: Apache-2.0
"""The packed transfer, bit by bit: what a program gets from the buffer is what the host wrote."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.features.schema import Schema
from jgr.features.unpacking import unpack_records
from jgr.serving.scorers.executors import Staging

SCHEMA = Schema.parse(
    "price:float32,flags:uint8[3],genres:int32[2],half:float16[3],small:int8[2],short:int16"
)
ROWS = 5
INPUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "history": ((70,), np.int32),
    "scalar": ((), np.float32),
    "odd": ((3, 7), np.uint8),
    "brain": ((3,), ml_dtypes.bfloat16),
    "half": ((2, 33), np.float16),
    "unsigned": ((1, 64), np.uint32),
    "records": ((ROWS, SCHEMA.record_bytes // 4), np.uint32),
}
LAYOUT = BufferLayout.of(INPUTS)


def bits(array: npt.NDArray[Any]) -> bytes:
    return array.tobytes()


def fill(staging: Staging, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Random bits in every input, NaNs of all kinds among them; a copy."""
    rng = np.random.default_rng(seed)
    written = {}
    for name, view in staging.views().items():
        content = np.frombuffer(rng.bytes(view.nbytes), view.dtype).reshape(view.shape)
        view[...] = content
        written[name] = content
    return written


@jax.jit
def unpacked(words: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    inputs = LAYOUT.unpack(words)
    features = unpack_records(SCHEMA, inputs["records"])
    # As integers: a NaN's bits may change on the way through a float register, not on the way to the device.
    size = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

    def seen(array: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(array, size[array.dtype.itemsize])

    return jax.tree.map(seen, (inputs, features))


def test_offsets_are_static_and_aligned() -> None:
    assert [field.offset for field in LAYOUT.fields] == [0, 512, 768, 1024, 1280, 1536, 1792]
    assert LAYOUT.size == 2048 and BufferLayout.of(INPUTS) == LAYOUT
    staging = Staging(LAYOUT)
    assert all(view.ctypes.data % ALIGNMENT == 0 for view in staging.views().values())


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.bool_, np.complex64, "S4"])
def test_what_cannot_cross_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"wrong: .* does not cross as it is"):
        BufferLayout.of({"right": ((2,), np.int32), "wrong": ((2,), dtype)})


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_inputs_arrive_bit_by_bit(memory_kind: str | None) -> None:
    staging = Staging(LAYOUT, memory_kind=memory_kind)
    for seed in range(3):
        written = fill(staging, seed)
        inputs, features = staging.run(unpacked)
        for name, content in written.items():
            assert inputs[name].shape == content.shape
            assert bits(np.asarray(inputs[name])) == bits(content), name
        records = np.frombuffer(written["records"].tobytes(), SCHEMA.dtype)
        for feature in SCHEMA.features:
            assert features[feature.name].shape == (ROWS, feature.width)
            assert bits(np.asarray(features[feature.name])) == bits(records[feature.name]), feature.name


def test_the_buffer_is_not_written_while_a_program_reads_it() -> None:
    layout = BufferLayout.of({"x": ((64,), np.float32)})
    staging = Staging(layout)

    @jax.jit
    def slow(words: jax.Array) -> jax.Array:
        """Busy for a while, then reads the buffer."""
        x = layout.unpack(words)["x"]
        noise = jax.lax.fori_loop(0, 300, lambda _, m: m @ m / 1000.0, jnp.ones((200, 200)))
        return x + jnp.where(jnp.isnan(noise[0, 0]), 1.0, 0.0)

    outs = []
    for number in range(6):
        staging.views()["x"][:] = number
        outs.append(staging.run(slow))
    assert [np.asarray(out).tolist() for out in outs] == [[float(number)] * 64 for number in range(6)]


def test_a_whole_buffer_is_written_at_once_and_read_as_one_record() -> None:
    staging, other = Staging(LAYOUT), Staging(LAYOUT)
    written = fill(staging, 5)
    content = np.concatenate([np.zeros(0, np.uint8), staging._buffer])
    other.write(content)
    views = other.views()
    for name, want in written.items():
        assert bits(views[name]) == bits(want), name
    plain = BufferLayout.of({"a": ((3,), np.int32), "b": ((2, 2), np.float32)})
    buffer = np.zeros(plain.size, np.uint8)
    record = buffer.view(plain.dtype)[0]
    record["a"][:], record["b"][1, 0] = (1, 2, 3), 0.5
    assert plain.views(buffer)["a"].tolist() == [1, 2, 3]
    assert plain.views(buffer)["b"].tolist() == [[0, 0], [0.5, 0]]


def test_a_program_is_compiled_for_the_buffer() -> None:
    staging = Staging(LAYOUT)
    compiled = unpacked.lower(staging.example).compile()
    written = fill(staging, 9)
    inputs, _ = staging.run(compiled)
    assert bits(np.asarray(inputs["history"])) == bits(written["history"])
