# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a decoder's tokens: a prompt's, those of the tokens that beams have generated, and kept ones.

Letters: B batch, T tokens, C cached tokens, W beams, S decode steps so far, L layers, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgr.prompt.layouts import Tokens


class ContextKV(NamedTuple):
    """The prompts' keys and values, shared by all beams of a request. k, v: [L, B, K, T, d]; keys stand after rope."""

    k: jax.Array
    v: jax.Array


class BeamKV(NamedTuple):
    """The generated tokens' keys and values. k, v: for each step s [L, B, W, K, d], of each beam's s-th token.

    A step adds its own arrays to those before it, so that nothing is copied whole.
    """

    k: tuple[jax.Array, ...] = ()
    v: tuple[jax.Array, ...] = ()

    def of_layer(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, [B, S + 1, W, K, d] each: its S steps and one more.

        Here self holds that layer's arrays, [B, W, K, d] for each step; k, v: [B, W, K, d], the step to add.
        """
        return jnp.stack([*self.k, k], axis=1), jnp.stack([*self.v, v], axis=1)

    def plus(self, k: jax.Array, v: jax.Array) -> BeamKV:
        return BeamKV((*self.k, k), (*self.v, v))


class CachedKV(NamedTuple):
    """Keys and values of earlier tokens.

    tokens: their segments, [B, C] each. of_layer: from a layer's number to its k and v, [B, K, C, d] each. A layer is
    read when it is computed, so that layers that are not computed are not copied.
    """

    tokens: Tokens
    of_layer: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
