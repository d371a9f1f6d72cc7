# SPDX-License-Identifier: Apache-2.0
"""Numbers in neutral memory: pages of 32-bit words, of which a model reads and writes runs in a type of its own.

The one idea: what is read is seen as numbers after it was gathered, and what is written is seen as words before. So no
program ever sees the array as anything but words, and none copies it for a type or a shape. A run lies within a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WORD = 4
"""Bytes of a word."""

_READ = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
_WRITE = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)


@dataclass(frozen=True)
class Cells:
    """How a class of entries divides its pages. words: of a cell; per_page: cells in a page."""

    words: int
    per_page: int

    @classmethod
    def of(cls, cell_bytes: int, page_bytes: int) -> Cells:
        return cls(cell_bytes // WORD, page_bytes // cell_bytes)

    def place(self, cells: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page of each cell, and the word of the page at which it begins."""
        return cells // self.per_page, cells % self.per_page * self.words


def seen_as(words: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """See words [..., n] uint32 as numbers [..., n * 4 / itemsize] of another dtype, without a change of bits."""
    numbers = lax.bitcast_convert_type(words, dtype)
    return numbers if dtype.itemsize == WORD else numbers.reshape(*words.shape[:-1], -1)


def as_words(numbers: jax.Array) -> jax.Array:
    """See numbers [..., n] as words [..., n * itemsize / 4] uint32; a run's numbers must fill whole words."""
    per_word = WORD // numbers.dtype.itemsize
    if per_word > 1:
        numbers = numbers.reshape(*numbers.shape[:-1], -1, per_word)
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def as_bits(numbers: jax.Array) -> jax.Array:
    """The uint16 that stand for bfloat16 numbers; other numbers as they are. Has no gradient.

    XLA for CPUs makes float32 of a whole bfloat16 array, and bfloat16 of that, to write a part of it.
    """
    return lax.bitcast_convert_type(numbers, jnp.uint16) if numbers.dtype == jnp.bfloat16 else numbers


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The numbers of a dtype that `as_bits` saw; others as they are."""
    return (
        lax.bitcast_convert_type(bits, dtype) if bits.dtype == jnp.uint16 and dtype == jnp.bfloat16 else bits
    )


def read(array: jax.Array, page: jax.Array, word: jax.Array, count: int) -> jax.Array:
    """Gather runs [..., count] uint32 of an array [pages, words] from these places [...] on.

    A place beyond it gives junk.
    """
    at = jnp.stack([page.reshape(-1), word.reshape(-1)], -1)
    mode = lax.GatherScatterMode.CLIP
    return lax.gather(array, at, _READ, (1, count), mode=mode).reshape(*page.shape, count)


def write(array: jax.Array, page: jax.Array, word: jax.Array, values: jax.Array) -> jax.Array:
    """Scatter values [..., count] uint32 to these places [...], all different.

    A page that the array lacks is left out.
    """
    at = jnp.stack([page.reshape(-1), word.reshape(-1)], -1)
    return lax.scatter(
        array,
        at,
        values.reshape(len(at), -1),
        _WRITE,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
