# SPDX-License-Identifier: Apache-2.0
"""Several prompts in one row, part of whose keys and values stand in a pool (BAT-4, BAT-5, BAT-14).

    rank:       new tokens and cached ones -> the score of every candidate, and the new tokens' KV
    write:      new tokens' KV into cells of the pool, in place

The pool is one array [pages, words] uint32 that other models use too. An entry has any of its cells. A cell holds some
tokens, layer by layer: [layer, token, 2, K, d] (`KVCells`). So consecutive layers of a cell are one run, and a program
reads just the layer that it computes. Reading programs are lent the pool, writing ones own it (donation) and return it.
Where several devices share the model, each has such a pool for its key/value heads, and a KVCells describes these.

A repaired item token (BAT-15, RCLLM-11) has a row of its own, in the real request, where it sees what stands before it.
An item that is not cached is computed alone all the same, as a request of its own: the real request sees its tokens too
(`Row.seen_by`), except for those that are repaired. With a `RepairChoice` the program chooses which are.

In plain order an item stands anywhere: its cached keys are rotated on from where they were computed, which is where the
item begins (RCLLM-12), and new ones are rotated back before they are kept.

Letters: R requests, T new tokens, C cached tokens, M candidates, S longest prompt, L layers, K key/value heads, d head
size, P parts of a cell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.models import decoder, words
from jgr.models.decoder import DecoderConfig, DecoderParams, Prefill
from jgr.models.kv import CachedKV, ContextKV
from jgr.models.params import layer_of
from jgr.models.rope import rope
from jgr.models.rounded import Rounded
from jgr.models.words import Cells
from jgr.ops import split
from jgr.ops.attention_mass import attention_mass
from jgr.prompt.layouts import Kind, Tokens

NOBODY = 2**30
"""A request number above all others, by which tokens of no request are sorted to the end."""


ChosenBy = Literal["deviation", "attention"]
"""Which item tokens are repaired. deviation: those whose second layer's values change most (PIC-3); attention: those
that get the most attention in the first layer (RCLLM-10)."""


class RepairChoice(NamedTuple):
    """What the program needs to choose the item tokens that it repairs.

    They are compared in plain order. cached_tokens: [C] int32, the cached tokens themselves. ranks: [T] int32; a row
    with rank r >= 0 is filled with the r-th of all the batch's item tokens that were computed alone, ordered by request
    and then as ChosenBy says. Other rows: -1. prompts: [T] int32, the request as whose token a new one is looked at, -1
    for none. looks: [C + T] int32, what tokens see there, and see where they are repaired, as bits. ends: [C + T]
    int32, 1 for the last tokens of items, which are chosen before all others; None: they are as the others.
    """

    cached_tokens: Any
    ranks: Any
    prompts: Any
    looks: Any
    ends: Any = None


class Row(NamedTuple):
    """One packed row: a batch's new tokens and the cached ones that they see. All arrays are int32.

    tokens: [T], the new tokens. described: what each of them is part of, [T] each. sees: [T], what each one sees, as
    the bits of its layout for its kind. slots: [C, P], where the cached tokens stand in the pool, see KVCells. cached:
    what each cached token is part of, [C] each. seen_by: [T], the request that sees a token computed in another one,
    else -1; None where nothing is repaired. choice: None unless the program chooses what is repaired. shift: [C], by
    how many positions cached keys are rotated on; None where none are.
    """

    tokens: Any
    described: Tokens
    sees: Any
    slots: Any
    cached: Tokens
    seen_by: Any = None
    choice: RepairChoice | None = None
    shift: Any = None


class Asked(NamedTuple):
    """How each candidate is scored, [M] int32 each.

    places: the new token whose logits score it. columns: the logit that is its score. negative_columns: the logit that
    is subtracted from it, -1 for none.
    """

    places: Any
    columns: Any
    negative_columns: Any


@dataclass(frozen=True)
class KVCells:
    """How a decoder's keys and values stand in the pool: in cells of `tokens` tokens and `layers` layers each, so that
    a cell is never larger than a page. All layers of a token need P = `parts` cells.

    run: 32-bit words of a token in a layer. A token has a slot in each part: the cell's number * tokens + its place
    in the cell. dtype: of keys and values as they are computed. rounded: how they are held in 8 bits; None: as they
    are.
    """

    dtype: str
    run: int
    tokens: int
    layers: int
    parts: int
    cells: Cells
    rounded: Rounded | None = None

    @property
    def held(self) -> str:
        """What the numbers of two pools must be alike in, for a cell of one to be a cell of the other."""
        return self.dtype if self.rounded is None else f"{self.dtype}-{self.rounded.kind}"

    @property
    def slots(self) -> int:
        """Number of token slots in a page."""
        return self.cells.per_page * self.tokens

    def place(self, slots: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The page and the word where a layer of tokens begins; slots: [..., P], layer: a number for each or all."""
        part = jnp.broadcast_to(layer // self.layers, slots.shape[:-1])
        slot = jnp.take_along_axis(slots, part[..., None], -1)[..., 0]
        page, word = self.cells.place(slot // self.tokens)
        return page, word + (layer % self.layers * self.tokens + slot % self.tokens) * self.run

    def as_words(self, both: jax.Array) -> jax.Array:
        """Runs [..., run] of tokens' keys and values [..., 2, K, d]."""
        if self.rounded is None:
            return words.as_words(both.reshape(*both.shape[:-3], -1))
        return self.rounded.write(both.reshape(*both.shape[:-3], -1, both.shape[-1]))

    def numbers(self, runs: jax.Array, size: int) -> jax.Array:
        """The keys and values [..., 2, K, d] of runs [..., run]; size: d."""
        dtype = np.dtype(self.dtype)
        found = words.seen_as(runs, dtype) if self.rounded is None else self.rounded.read(runs, dtype)
        return found.reshape(*runs.shape[:-1], 2, -1, size)


def read_layer(
    pool: jax.Array, slots: jax.Array, real: jax.Array, layer: jax.Array, kv: KVCells, cfg: DecoderConfig
) -> jax.Array:
    """One layer [..., 2, K, d] of the tokens in slots [..., P]; 0 where a token is not real [...]: there may be
    another model's words, which may be no numbers at all."""

    def gather(pool: jax.Array, slots: jax.Array, layer: jax.Array) -> jax.Array:
        return kv.numbers(words.read(pool, *kv.place(slots, layer), kv.run), cfg.head_dim)

    given = split.along(1), split.EVERYWHERE, split.EVERYWHERE
    found = split.on_each(gather, (pool, slots, layer), given, split.along(slots.ndim))
    return jnp.where(real[..., None, None, None], found, 0)


class Forwarded(NamedTuple):
    """hidden: [N, D], of the new tokens that were asked for. new: the KV [L, 1, K, T, d] of all new tokens. row: the
    row as it was computed, with the repaired tokens in their places."""

    hidden: jax.Array
    new: ContextKV
    row: Row


def forward(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    read: jax.Array,
    cfg: DecoderConfig,
    kv: KVCells,
    chosen_by: ChosenBy = "deviation",
    decided: Decided | None = None,
) -> Forwarded:
    """Run a batch. read: [N] int32, the new tokens' places whose hidden states are wanted. decided: what `decide` gave
    for the row, where tokens are chosen by attention; None: it is found here."""
    if row.choice is not None and chosen_by == "attention":
        found = decide(params, row, cfg=cfg) if decided is None else decided
        return _forward_by_attention(params, pool, row, found, read, cfg, kv)
    if row.choice is not None:
        return _forward_by_deviation(params, pool, row, row.choice, read, cfg, kv)
    out = _prefill(params, pool, row, cfg, kv, read=read[None])
    return Forwarded(out.hidden[0], out.context, row)


def _prefill(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    cfg: DecoderConfig,
    kv: KVCells,
    layers: slice = slice(None),
    hidden: jax.Array | None = None,
    keep_layers: bool = False,
    read: jax.Array | None = None,
) -> Prefill:
    row = jax.tree.map(lambda x: x[None], row._replace(choice=None))
    turn = None if row.shift is None else decoder.rotations(cfg, row.shift)

    def of_layer(layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = read_layer(pool, row.slots, row.cached.request >= 0, layer, kv, cfg)
        keys, values = found[:, :, 0], found[:, :, 1]
        if turn is not None:
            keys = rope(keys, *turn)
        return keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)

    return decoder.prefill(
        params,
        cfg,
        row.tokens,
        row.tokens,
        segments=row.described,
        layout=row.sees,
        before=CachedKV(row.cached, of_layer),
        seen_by=row.seen_by,
        hidden=hidden,
        layers=layers,
        keep_layers=keep_layers,
        read=read,
    )


def _prompts(row: Row, choice: RepairChoice) -> tuple[jax.Array, Tokens]:
    """Every token of the prompts once, the cached ones first: [C + T], and what each is part of."""
    joined = zip(row.cached, row.described._replace(request=choice.prompts), strict=True)
    tokens = jnp.concatenate([choice.cached_tokens, row.tokens])
    return tokens, Tokens(*(jnp.concatenate(pair) for pair in joined))


def _in_order(prompts: Tokens) -> jax.Array:
    """Which of the tokens [C + T] stands at each place of the prompts, one prompt after the other; those of none last.

    In this order attention leaves out the blocks of which nothing is seen.
    """
    return jnp.lexsort((prompts.order, jnp.where(prompts.request < 0, NOBODY, prompts.request)))


def _chosen(row: Row, choice: RepairChoice, prompts: Tokens, worth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows [T] are filled, and with which of the prompts' tokens [C + T]: those worth [C + T] the most."""
    if choice.ends is not None:
        worth = jnp.where(choice.ends > 0, jnp.inf, worth)
    from_cache = jnp.arange(len(prompts.kind)) < len(row.slots)
    was_alone = from_cache | jnp.pad(row.seen_by >= 0, (len(row.slots), 0))
    may = was_alone & (prompts.kind == Kind.ITEM) & (prompts.request >= 0)
    ranking = jnp.lexsort((-worth, jnp.where(may, prompts.request, NOBODY)))
    picked = choice.ranks >= 0
    chosen = ranking[choice.ranks]
    # In the prompts' order, so that attention leaves out blocks of which nothing is seen.
    chosen = chosen[jnp.lexsort((prompts.order[chosen], prompts.request[chosen], ~picked))]
    return picked, chosen[jnp.maximum(jnp.cumsum(picked) - 1, 0)]


class Decided(NamedTuple):
    """Which item tokens are repaired: picked, [T], the rows that are filled; chosen, [T] int32, with which of the
    prompts' tokens [C + T]."""

    picked: Any
    chosen: Any


@functools.partial(jax.jit, static_argnames="cfg")
def decide(params: DecoderParams, row: Row, *, cfg: DecoderConfig) -> Decided:
    """What is repaired by attention (RCLLM-10). It reads no pool, so that what is reused may travel there meanwhile
    (RCLLM-13).

    What a token gets in the first layer follows from the embeddings alone, so that the others than the chosen ones go
    through no layer, not even the first, where what is reused is exact (RCLLM-11).
    """
    assert row.choice is not None
    choice, (tokens, prompts) = row.choice, _prompts(row, row.choice)
    with jax.named_scope("choose"):
        order = _in_order(prompts)

        def gained(count: int) -> jax.Array:
            """What all tokens [C + T] get of the first so many in order."""
            which = order[:count]
            described = Tokens(*(x[which][None] for x in prompts))
            embedded = split.rows(params.embed, tokens[which][None])
            turn = decoder.rotations(cfg, described.position)
            q, k, _ = decoder.heads_of(cfg, layer_of(params.layers, 0), embedded, turn)
            mass = attention_mass(q, k.transpose(0, 2, 1, 3), described, choice.looks[which][None])[0]
            return jnp.zeros(len(tokens), mass.dtype).at[which].set(mass)

        worth = _of_few(gained, prompts, max(len(row.slots), len(row.tokens)))
        return Decided(*_chosen(row, choice, prompts, worth))


def _of_few(of: Callable[[int], jax.Array], prompts: Tokens, few: int) -> jax.Array:
    """What `of` gives for the prompts' tokens [C + T]. Most batches have far fewer than cached and new ones together
    may be; few: so many are computed for less."""
    number = (prompts.request >= 0).sum()
    total = len(prompts.request)
    found: jax.Array = jax.lax.cond(number <= few, lambda: of(few), lambda: of(total))
    return found


def _forward_by_attention(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    decided: Decided,
    read: jax.Array,
    cfg: DecoderConfig,
    kv: KVCells,
) -> Forwarded:
    """The decided tokens in their rows."""
    assert row.choice is not None
    (tokens, prompts), (picked, chosen) = _prompts(row, row.choice), decided
    row = _with_repairs(row, prompts, row.choice.looks, picked, chosen)
    row = row._replace(tokens=jnp.where(picked, tokens[chosen], row.tokens))
    out = _prefill(params, pool, row, cfg, kv, read=read[None])
    return Forwarded(out.hidden[0], out.context, row)


def _forward_by_deviation(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    choice: RepairChoice,
    read: jax.Array,
    cfg: DecoderConfig,
    kv: KVCells,
) -> Forwarded:
    """PIC-3 with one check layer: all tokens go through the first layer, the chosen ones through the others too.

    The first layer's keys and values depend on token and position only, so nothing is repaired in it.
    """
    cached, others = len(row.slots), slice(1, None)
    tokens, prompts = _prompts(row, choice)
    plain = _first_layer_of_prompts(params, tokens, prompts, choice.looks, cfg, max(cached, len(row.tokens)))
    own = (
        choice.prompts == row.described.request
    )  # the others are computed alone, or in another prompt's place
    alone = jax.lax.cond(
        (~own & (row.described.request >= 0)).any(),
        lambda: _first_layer(_prefill(params, pool, row, cfg, kv, slice(1), keep_layers=True)),
        lambda: jnp.zeros_like(plain[cached:]),
    )
    hidden = jnp.where(own[:, None], plain[cached:], alone)
    with jax.named_scope("choose"):
        check = layer_of(params.layers, 1)
        kept = read_layer(pool, row.slots, row.cached.request >= 0, jnp.int32(1), kv, cfg)[:, 1]
        old = jnp.concatenate([kept.reshape(cached, -1), decoder.values(cfg, check, hidden)])
        change = (decoder.values(cfg, check, plain) - old).astype(jnp.float32)
        picked, chosen = _chosen(row, choice, prompts, jnp.square(change).sum(-1))
    hidden = jnp.where(picked[:, None], plain[chosen], hidden)[None]
    row = _with_repairs(row, prompts, choice.looks, picked, chosen)
    own_tokens = jnp.where(picked, tokens[chosen], row.tokens)
    turn = decoder.rotations(cfg, row.described.position)
    _, *begin = decoder.heads_of(cfg, layer_of(params.layers, 0), split.rows(params.embed, own_tokens), turn)
    rest = _prefill(params, pool, row, cfg, kv, others, hidden, read=read[None])
    first = (x.swapaxes(0, 1)[None, None] for x in begin)
    both = zip(first, rest.context, strict=True)
    return Forwarded(rest.hidden[0], ContextKV(*(jnp.concatenate(kv) for kv in both)), row)


def _first_layer(out: Prefill) -> jax.Array:
    """What the first layer gives for the one row [T, D]."""
    assert out.layers is not None
    return out.layers[0, 0]


def _first_layer_of_prompts(
    params: DecoderParams, tokens: jax.Array, prompts: Tokens, looks: jax.Array, cfg: DecoderConfig, few: int
) -> jax.Array:
    """What the first layer gives for all tokens [C + T, D] of the prompts, 0 for others. few: see `_of_few`."""
    order = _in_order(prompts)

    def of(count: int) -> jax.Array:
        which = order[:count]
        out = decoder.prefill(
            params,
            cfg,
            tokens[which][None],
            tokens[which][None],
            segments=Tokens(*(x[which][None] for x in prompts)),
            layout=looks[which][None],
            layers=slice(1),
            keep_layers=True,
        )
        found = _first_layer(out)
        return jnp.zeros((len(tokens), found.shape[1]), found.dtype).at[which].set(found)

    return _of_few(of, prompts, few)


def _with_repairs(row: Row, prompts: Tokens, looks: jax.Array, picked: jax.Array, chosen: jax.Array) -> Row:
    """The row with the chosen of the tokens [C + T] in their places [T]; nobody sees the unrepaired ones."""
    cached = len(row.slots)
    none = jnp.zeros(len(prompts.request), bool)
    replaced = none.at[jnp.where(picked, chosen, len(none))].set(True, mode="drop")
    fields = zip(row.described, prompts, strict=True)
    return row._replace(
        described=Tokens(*(jnp.where(picked, token[chosen], own) for own, token in fields)),
        sees=jnp.where(picked, looks[chosen], row.sees),
        cached=row.cached._replace(request=jnp.where(replaced[:cached], -1, row.cached.request)),
        seen_by=jnp.where(replaced[cached:], -1, row.seen_by),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "kv", "chosen_by"))
def rank(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    asked: Asked,
    decided: Decided | None = None,
    *,
    cfg: DecoderConfig,
    kv: KVCells,
    chosen_by: ChosenBy = "deviation",
) -> tuple[jax.Array, ContextKV]:
    """Score every candidate: scores [M] float32, and the new tokens' KV, which `write` may keep. decided: see
    `forward`."""
    hidden, new, _ = forward(params, pool, row, asked.places, cfg, kv, chosen_by, decided)
    with jax.named_scope("score"):
        rows = params.output_rows
        direction = split.rows(rows, asked.columns).astype(jnp.float32)
        negative = split.rows(rows, jnp.maximum(asked.negative_columns, 0))
        direction -= jnp.where(asked.negative_columns[:, None] >= 0, negative, 0)
        return (hidden.astype(jnp.float32) * direction).sum(-1), new


@functools.partial(jax.jit, static_argnames=("kv", "cfg"), donate_argnames="pool")
def write(
    pool: jax.Array,
    new: ContextKV,
    slots: jax.Array,
    shift: jax.Array | None = None,
    *,
    kv: KVCells,
    cfg: DecoderConfig | None = None,
) -> jax.Array:
    """The pool with the KV of new tokens in slots [T, P] int32; a slot that the pool does not have is left out.

    shift: [T] int32, by how many positions keys are rotated back, which needs cfg; None: by none.
    """

    def scatter(pool: jax.Array, new: ContextKV, slots: jax.Array) -> jax.Array:
        both = jnp.stack([x[:, 0] for x in new], axis=1).transpose(0, 3, 1, 2, 4)  # [L, T, 2, K, d]
        layers = len(both)
        place = kv.place(jnp.broadcast_to(slots, (layers, *slots.shape)), jnp.arange(layers)[:, None])
        return words.write(pool, *place, kv.as_words(both))

    if shift is not None:
        assert cfg is not None
        back = rope(new.k.swapaxes(2, 3), *decoder.rotations(cfg, -shift))  # [L, 1, T, K, d]
        new = new._replace(k=back.swapaxes(2, 3))
    given = split.along(1), split.along(2), split.EVERYWHERE
    written: jax.Array = split.on_each(scatter, (pool, new, slots), given, split.along(1))
    return written
