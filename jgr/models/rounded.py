# SPDX-License-Identifier: Apache-2.0
"""Kept numbers in 8 bits (cache.quantize): a run of words holds vectors, each with a factor of its own behind them.

    factor[n]    = max over d of |x[n, d]|, divided by the largest number of the type (127, or 448), in 16 bits
    values[n, d] = x[n, d] / factor[n], rounded to the nearest, to even in the middle

The one idea: values and factors are one run of a cell. So what moves, copies, shares or gives up cells of the pool
knows nothing of it, and a token that is appended changes nothing of those that stand there. A vector is a head's key,
or value, of one token: a factor for several of either, or one for a channel of several tokens, has the larger error,
or would have to be changed with every new token.

The factor is bfloat16, a little above the quotient, so that the largest number is not cut off. A vector with what is
no finite number has a factor that is none, and stays without any finite number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jgr.models import words
from jgr.models.quantize import FP8, LARGEST

FACTOR = np.dtype(ml_dtypes.bfloat16)
_UP = np.float32(1 + 2**-8)
"""What a float32 number is multiplied by, so that the nearest of FACTOR's numbers is not below it."""


@dataclass(frozen=True)
class Rounded:
    """The words of n = `vectors` vectors of d = `size` numbers. kind: see model.quantize, never empty."""

    kind: Literal["int8", "fp8"]
    vectors: int
    size: int

    @property
    def words(self) -> int:
        """The length of a run; values and factors each begin with a word."""
        return self._first + -(-self.vectors * int(FACTOR.itemsize) // words.WORD)

    @property
    def _first(self) -> int:
        """The word at which the factors begin."""
        return -(-self.vectors * self.size // words.WORD)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int8) if self.kind == "int8" else FP8

    def write(self, numbers: jax.Array) -> jax.Array:
        """The run [..., words] uint32 of vectors [..., n, d] of any floating dtype."""
        whole, largest = numbers.astype(jnp.float32), np.float32(LARGEST[self.kind])
        factor = (jnp.abs(whole).max(-1) * (_UP / largest)).astype(FACTOR)
        step = jnp.where(factor > 0, factor, 1).astype(jnp.float32)[..., None]
        values = jnp.clip(whole / step, -largest, largest)
        values = (jnp.round(values) if self.kind == "int8" else values).astype(self._dtype)
        return jnp.concatenate([_as_words(values.reshape(*factor.shape[:-1], -1)), _as_words(factor)], -1)

    def read(self, run: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
        """The vectors [..., n, d] of runs [..., words] uint32, in this dtype; multiplied in float32."""
        shape = (*run.shape[:-1], self.vectors, self.size)
        values = words.seen_as(run[..., : self._first], self._dtype)[..., : self.vectors * self.size]
        factor = words.seen_as(run[..., self._first :], FACTOR)[..., : self.vectors, None]
        made: jax.Array = values.reshape(shape).astype(jnp.float32) * factor.astype(jnp.float32)
        return made.astype(dtype)


def _as_words(numbers: jax.Array) -> jax.Array:
    """See words.as_words; zeros fill the last word."""
    fill = -numbers.shape[-1] % (words.WORD // numbers.dtype.itemsize)
    return words.as_words(jnp.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, fill)]) if fill else numbers)
