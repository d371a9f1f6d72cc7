# SPDX-License-Identifier: Apache-2.0
"""Several prompts in one row, part of whose keys and values stand in a pool (BAT-4, BAT-5, BAT-14).

    rank:       new tokens and cached ones -> the score of every candidate, and the new tokens' KV
    recommend:  the same -> each prompt's ContextKV, put together of both -> beam search
    write:      new tokens' KV into slots of the pool, in place
    read_cells, write_cells: whole cells out of the pool and back, for the host tier

The pool is one array [pages, E]; a slot is one token's KV of all layers, so that a page is page_tokens slots behind
each other, and an entry any slots at all. Reading programs are lent the pool, writing ones own it (donation) and return
it.

Repaired item tokens (BAT-15) are rows of their own, in a request in which every item token sees the items before its
own. An item that is not cached is computed alone all the same: as a request of its own, whose tokens the real one sees
also, but for those that are repaired. `Picks` lets the program choose which are.

Letters: R requests, T new tokens, C cached tokens, M candidates, S longest prompt, L layers, K key/value heads, d head
size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.models import beam, decoder
from jgr.models.beam import Beams, CatalogTables, Filters, Normalize
from jgr.models.decoder import ContextKV, DecoderConfig, DecoderParams, Prefill, SlotKV
from jgr.models.params import layer_of
from jgr.prompt.layouts import REPAIRED_ITEM, Kind, Tokens

NOBODY = 2**30
"""Behind every request."""


class Picks(NamedTuple):
    """cached: [C] int32, the cached tokens themselves. places: [T] int32, of a row to be filled, which item token it
    is, from 0 on over all of a batch, request after request, by falling deviation; others: -1."""

    cached: Any
    places: Any


class Row(NamedTuple):
    """The new tokens of a batch and the cached ones: arrays of integers, int32.

    tokens: [T]. described: of them, [T] each. sees: [T], the bits of each one's layout for its kind.
    slots: [C] of the cached tokens. cached: of them, [C] each. also: [T], the request that sees a token computed in
    another one, else -1; None where nothing is repaired. picks: where the program chooses what is repaired.
    """

    tokens: Any
    described: Tokens
    sees: Any
    slots: Any
    cached: Tokens
    also: Any = None
    picks: Picks | None = None


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
    params: DecoderParams, pool: jax.Array, row: Row, read: jax.Array, cfg: DecoderConfig
) -> tuple[jax.Array, ContextKV]:
    """Hidden states [P, D] of the new tokens at read [P], and the KV [L, 1, K, T, d] of all of them."""
    if row.picks is not None:
        return _forward_with_picks(params, pool, row, row.picks, read, cfg)
    out = _prefill(params, pool, row, cfg, read=read[None])
    return out.hidden[0], out.context


def _prefill(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    cfg: DecoderConfig,
    layers: slice = slice(None),
    hidden: jax.Array | None = None,
    keep_layers: bool = False,
    read: jax.Array | None = None,
) -> Prefill:
    row = jax.tree.map(lambda x: x[None], row._replace(picks=None))
    return decoder.prefill(
        params,
        cfg,
        row.tokens,
        row.tokens,
        segments=row.described,
        layout=row.sees,
        before=SlotKV(_slots(pool, cfg), row.slots, row.cached),
        also=row.also,
        hidden=hidden,
        layers=layers,
        keep_layers=keep_layers,
        read=read,
    )


def _forward_with_picks(
    params: DecoderParams, pool: jax.Array, row: Row, picks: Picks, read: jax.Array, cfg: DecoderConfig
) -> tuple[jax.Array, ContextKV]:
    """PIC-3 with one check layer: all item tokens go through the first layer, the chosen ones through the others too.

    The first layer's keys and values hang on token and position only, so that nothing is repaired in it.
    """
    first, others = slice(1), slice(1, None)
    alone = _prefill(params, pool, row, cfg, first, keep_layers=True)
    # Every item token once, the cached ones first, in the real request: as in the causal order.
    joined = zip(row.cached, row.described._replace(request=row.also), strict=True)
    items = Tokens(*(jnp.concatenate(pair) for pair in joined))
    items = items._replace(request=jnp.where(items.kind == Kind.ITEM, items.request, -1))
    tokens = jnp.concatenate([picks.cached, row.tokens])[None]
    described = Tokens(*(x[None] for x in items))
    causal = decoder.prefill(
        params,
        cfg,
        tokens,
        tokens,
        segments=described,
        layout=jnp.full_like(tokens, REPAIRED_ITEM),
        layers=first,
        keep_layers=True,
    )
    assert alone.layers is not None and causal.layers is not None
    with jax.named_scope("choose"):
        check = layer_of(params.layers, 1)
        old = jnp.concatenate(
            [
                _slots(pool, cfg)[row.slots, 1, 1].reshape(len(row.slots), -1),
                decoder.values(cfg, check, alone.layers[0, 0]),
            ]
        )
        change = (decoder.values(cfg, check, causal.layers[0, 0]) - old).astype(jnp.float32)
        last = jnp.where(items.request < 0, NOBODY, items.request)
        ranking = jnp.lexsort((-jnp.square(change).sum(-1), last))
        picked = picks.places >= 0
        chosen = ranking[picks.places]
    hidden = jnp.where(picked[:, None], causal.layers[0, 0, chosen], alone.layers[0, 0])[None]
    rest = _prefill(
        params, pool, _with_picks(row, items, picked, chosen), cfg, others, hidden, read=read[None]
    )
    both = zip(alone.context, rest.context, strict=True)
    return rest.hidden[0], ContextKV(*(jnp.concatenate(kv) for kv in both))


def _with_picks(row: Row, items: Tokens, picked: jax.Array, chosen: jax.Array) -> Row:
    """The row with the chosen of the items [C + T] in their places [T], which nobody else sees any more."""
    cached = len(row.slots)
    none = jnp.zeros(len(items.request), bool)
    replaced = none.at[jnp.where(picked, chosen, len(none))].set(True, mode="drop")
    fields = zip(row.described, items, strict=True)
    return row._replace(
        described=Tokens(*(jnp.where(picked, item[chosen], own) for own, item in fields)),
        sees=jnp.where(picked, REPAIRED_ITEM, row.sees),
        cached=row.cached._replace(request=jnp.where(replaced[:cached], -1, row.cached.request)),
        also=jnp.where(replaced[cached:], -1, row.also),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def rank(
    params: DecoderParams, pool: jax.Array, row: Row, asked: Asked, *, cfg: DecoderConfig
) -> tuple[jax.Array, ContextKV]:
    """Scores [M] float32, and the new tokens' KV."""
    hidden, new = _forward(params, pool, row, asked.places, cfg)
    with jax.named_scope("score"):
        rows = params.output_rows
        direction = rows[asked.columns].astype(jnp.float32)
        direction -= jnp.where(asked.less[:, None] >= 0, rows[jnp.maximum(asked.less, 0)], 0)
        return (hidden.astype(jnp.float32) * direction).sum(-1), new


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
    last = whole.tokens[jnp.arange(len(whole.lengths)), jnp.maximum(whole.lengths - 1, 0)] - len(row.slots)
    hidden, new = _forward(params, pool, row, jnp.maximum(last, 0), cfg)
    with jax.named_scope("join"):
        cached = _slots(pool, cfg)[row.slots].transpose(1, 2, 3, 0, 4)  # [L, 2, K, C, d]
        context = ContextKV(
            *(
                jnp.concatenate([cached[:, i], x[:, 0]], axis=2)[:, :, whole.tokens].transpose(0, 2, 1, 3, 4)
                for i, x in enumerate(new)
            )
        )
    state = decoder.State(context, whole.lengths, whole.start)
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
