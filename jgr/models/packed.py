# SPDX-License-Identifier: Apache-2.0
"""Several prompts in one row, part of whose keys and values stand in a pool (BAT-4, BAT-5, BAT-14).

    rank:       new tokens and cached ones -> the score of every candidate, and the new tokens' KV
    recommend:  the same -> each prompt's ContextKV, put together of both -> beam search
    write:      new tokens' KV into slots of the pool, in place
    read_cells, write_cells: whole cells out of the pool and back, for the host tier

The pool is one array [pages, E]; a slot is one token's KV of all layers, so that a page is page_tokens slots behind
each other, and an entry any slots at all. Reading programs are lent the pool, writing ones own it (donation) and return
it.

Letters: R requests, T new tokens, C cached tokens, M candidates, S longest prompt, L layers, K key/value heads, d head
size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.layouts import Tokens
from jgr.models import beam, decoder
from jgr.models.beam import Beams, CatalogTables, Filters, Normalize
from jgr.models.decoder import ContextKV, DecoderConfig, DecoderParams, SlotKV


class Row(NamedTuple):
    """The new tokens of a batch and the cached ones: arrays of integers, int32.

    tokens: [T]. described: of them, [T] each. sees: [T], the bits of each one's layout for its kind.
    slots: [C] of the cached tokens. cached: of them, [C] each.
    """

    tokens: Any
    described: Tokens
    sees: Any
    slots: Any
    cached: Tokens


class Asked(NamedTuple):
    """Of each candidate, [M] int32: the new token that scores it, the logit that is its score, and the one less."""

    places: Any
    columns: Any
    less: Any


def slot_elements(cfg: DecoderConfig) -> int:
    """Numbers in a slot."""
    return cfg.layers * 2 * cfg.kv_heads * cfg.head_dim


def _slots(pool: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """A view: [slots, L, 2, K, d]."""
    return pool.reshape(-1, cfg.layers, 2, cfg.kv_heads, cfg.head_dim)


def _forward(
    params: DecoderParams, pool: jax.Array, row: Row, cfg: DecoderConfig
) -> tuple[jax.Array, ContextKV]:
    """Hidden states [T, D] and the KV [L, 1, K, T, d] of the new tokens."""
    described, cached = (Tokens(*(x[None] for x in tokens)) for tokens in (row.described, row.cached))
    before = SlotKV(_slots(pool, cfg), row.slots[None], cached)
    out = decoder.prefill(
        params,
        cfg,
        row.tokens[None],
        row.tokens[None],
        segments=described,
        layout=row.sees[None],
        before=before,
    )
    return out.hidden[0], out.context


@functools.partial(jax.jit, static_argnames="cfg")
def rank(
    params: DecoderParams, pool: jax.Array, row: Row, asked: Asked, *, cfg: DecoderConfig
) -> tuple[jax.Array, ContextKV]:
    """Scores [M] float32, and the new tokens' KV."""
    hidden, new = _forward(params, pool, row, cfg)
    with jax.named_scope("score"):
        rows = params.output_rows
        direction = rows[asked.columns].astype(jnp.float32)
        direction -= jnp.where(asked.less[:, None] >= 0, rows[jnp.maximum(asked.less, 0)], 0)
        return (hidden[asked.places].astype(jnp.float32) * direction).sum(-1), new


class Whole(NamedTuple):
    """Of each prompt: where its tokens [R, S] int32 stand, in the row's cached tokens or from C on in its new ones; its
    length [R]; the position behind it [R]."""

    tokens: Any
    lengths: Any
    start: Any


@functools.partial(jax.jit, static_argnames=("cfg", "width", "normalize", "approximate"))
def recommend(
    params: DecoderParams,
    pool: jax.Array,
    tables: CatalogTables,
    row: Row,
    whole: Whole,
    widths: jax.Array,
    filters: Filters | None = None,
    *,
    cfg: DecoderConfig,
    width: int,
    normalize: Normalize = "valid",
    approximate: int = 0,
) -> tuple[Beams, ContextKV]:
    """See beam.recommend; and the new tokens' KV."""
    hidden, new = _forward(params, pool, row, cfg)
    with jax.named_scope("join"):
        cached = _slots(pool, cfg)[row.slots].transpose(1, 2, 3, 0, 4)  # [L, 2, K, C, d]
        context = ContextKV(
            *(
                jnp.concatenate([cached[:, i], x[:, 0]], axis=2)[:, :, whole.tokens].transpose(0, 2, 1, 3, 4)
                for i, x in enumerate(new)
            )
        )
    last = whole.tokens[jnp.arange(len(whole.lengths)), jnp.maximum(whole.lengths - 1, 0)] - len(row.slots)
    state = decoder.State(context, whole.lengths, whole.start)
    beams = beam.search(
        params,
        tables,
        hidden[jnp.maximum(last, 0)][:, None],
        state,
        widths,
        filters,
        cfg=cfg,
        width=width,
        normalize=normalize,
        approximate=approximate,
    )
    return beams, new


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="pool")
def write(pool: jax.Array, new: ContextKV, slots: jax.Array, *, cfg: DecoderConfig) -> jax.Array:
    """The pool with the KV of new tokens in slots [T] int32; a slot that the pool does not have is left out."""
    kv = jnp.stack([x[:, 0] for x in new], axis=1).transpose(3, 0, 1, 2, 4)  # [T, L, 2, K, d]
    return _slots(pool, cfg).at[slots].set(kv, mode="drop").reshape(pool.shape)


@functools.partial(jax.jit, static_argnames="cells")
def read_cells(pool: jax.Array, numbers: jax.Array, *, cells: int) -> jax.Array:
    """[n, elements of a cell]: cells of the pool, of which a page has `cells`; numbers: [n] int32."""
    return pool.reshape(len(pool) * cells, -1)[numbers]


@functools.partial(jax.jit, static_argnames="cells", donate_argnames="pool")
def write_cells(pool: jax.Array, numbers: jax.Array, values: jax.Array, *, cells: int) -> jax.Array:
    """The pool with cells [n, elements of a cell] in their places; a number that the pool does not have is left out."""
    flat = pool.reshape(len(pool) * cells, -1)
    return flat.at[numbers].set(values, mode="drop").reshape(pool.shape)
