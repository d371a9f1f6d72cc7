# SPDX-License-Identifier: Apache-2.0
"""Generation after the prompts of a packed row (see `jgr.models.packed`): each prompt's keys and values, from
cached and new tokens, and a beam search over them.

Letters: R requests, T new tokens, C cached tokens, S longest prompt, L layers, K key/value heads, d head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.models import beam, decoder
from jgr.models.beam import Beams, CatalogTables, Filters, Normalize
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.kv import ContextKV
from jgr.models.packed import KVCells, Row, forward, read_layer


class WholePrompts(NamedTuple):
    """Where each prompt's tokens stand in the packed row, so that its ContextKV can be gathered. int32.

    tokens: [R, S], places in the row: below C a cached token, from C on a new one. lengths: [R], tokens of each prompt.
    start: [R], the position that follows each prompt.
    """

    tokens: Any
    lengths: Any
    start: Any


@functools.partial(jax.jit, static_argnames=("cfg", "kv", "width", "normalize", "approximate", "levels"))
def recommend(
    params: DecoderParams,
    pool: jax.Array,
    tables: CatalogTables,
    row: Row,
    prompts: WholePrompts,
    widths: jax.Array,
    filters: Filters | None = None,
    *,
    cfg: DecoderConfig,
    kv: KVCells,
    width: int,
    normalize: Normalize = "valid",
    approximate: int = 0,
    levels: bool = False,
) -> tuple[Beams, ContextKV]:
    """Search the prompts' best items, see beam.recommend: the beams, and the new tokens' KV, which `write` may keep."""
    last = prompts.tokens[jnp.arange(len(prompts.lengths)), jnp.maximum(prompts.lengths - 1, 0)]
    last = last - len(row.slots)
    hidden, new, _ = forward(params, pool, row, jnp.maximum(last, 0), cfg, kv)
    with jax.named_scope("join"):
        context = _join(pool, row, new, prompts, cfg, kv)
    state = decoder.State(context, prompts.lengths, prompts.start)
    beams = beam.search(
        params,
        tables,
        hidden[:, None],
        state,
        widths,
        filters,
        cfg=cfg,
        width=width,
        normalize=normalize,
        approximate=approximate,
        levels=levels,
    )
    return beams, new


def _join(
    pool: jax.Array, row: Row, new: ContextKV, prompts: WholePrompts, cfg: DecoderConfig, kv: KVCells
) -> ContextKV:
    """Gather each prompt's keys and values [L, R, K, S, d], of its cached and its new tokens, into their order."""
    cached = len(row.slots)
    is_new = (prompts.tokens >= cached)[:, None, :, None]
    at_old, at_new = jnp.minimum(prompts.tokens, cached - 1), jnp.maximum(prompts.tokens - cached, 0)
    slots, real = row.slots[at_old], row.cached.request[at_old] >= 0

    def of_layer(_: None, xs: tuple[jax.Array, ContextKV]) -> tuple[None, ContextKV]:
        number, computed = xs
        old = read_layer(pool, slots, real, number, kv, cfg).transpose(2, 0, 3, 1, 4)
        fresh = (x[0][:, at_new].transpose(1, 0, 2, 3) for x in computed)
        return None, ContextKV(*(jnp.where(is_new, x, y) for x, y in zip(fresh, old, strict=True)))

    return jax.lax.scan(of_layer, None, (jnp.arange(cfg.layers), new))[1]
