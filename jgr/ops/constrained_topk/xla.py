# SPDX-License-Identifier: Apache-2.0
"""The beam step in two forms, chosen while the program runs by how many children the beams have together.

dense: one matmul for the level's columns, with the children of each beam as bits over the columns; it costs what a step
without a catalog costs. packed: where there are few children, the output rows of all of them are gathered one after the
other, and only their logits are computed. Neither depends on the size of the catalog or on its largest degree.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgr.ops.constrained_topk import children, select
from jgr.ops.constrained_topk.children import WORD, Arguments, Nodes, StepFilter, TreeLevel
from jgr.ops.constrained_topk.reference import Step
from jgr.ops.exponential import exp_negative
from jgr.ops.token_logits import token_logits

_PACKED_CHUNK = 2048


def columns(vocabulary: int) -> int:
    """How many rows an output head is padded to, so that its columns divide into blocks."""
    unit = select.BLOCK if vocabulary > select.BLOCK else WORD
    return -(-vocabulary // unit) * unit


def constrained_topk(call: Arguments) -> Step:
    """See jgr.ops.constrained_topk."""
    hidden, head, beam_scores, nodes, level, width, normalizer, filters, packed, approximate = call
    vocabulary = head.shape[0]
    head = jnp.pad(head, ((0, columns(vocabulary) - vocabulary), (0, 0)))
    beams = _Beams(beam_scores, children.nodes_of(level, nodes, ~jnp.isneginf(beam_scores)), normalizer)

    def dense() -> Step:
        return _dense(hidden, head, beams, level, filters, width, approximate)

    if packed == 0 or approximate:
        return dense()
    step: Step = jax.lax.cond(
        beams.nodes.degree.sum(axis=1).max() <= packed,
        lambda: _packed(hidden, head, beams, level, filters, width, packed),
        dense,
    )
    return step


class _Beams(NamedTuple):
    scores: jax.Array
    nodes: Nodes
    normalizer: jax.Array | None


def _dense(
    hidden: jax.Array,
    head: jax.Array,
    beams: _Beams,
    level: TreeLevel,
    filters: StepFilter | None,
    width: int,
    approximate: int,
) -> Step:
    words = head.shape[0] // WORD
    block = min(select.BLOCK, head.shape[0])
    logits = token_logits(hidden, head)
    legal = children.legal_words(level, beams.nodes, words)
    maxima = _block_maxima(logits, legal, block)
    norm = beams.normalizer
    if norm is None:
        norm = legal_logsumexp(logits, legal, maxima.max(axis=-1))
    allowed = legal
    if filters is not None:
        narrow = filters

        def fewer() -> tuple[jax.Array, jax.Array]:
            left = children.narrowed(level, beams.nodes, legal, narrow)
            return left, _block_maxima(logits, left, block)

        allowed, maxima = jax.lax.cond(filters.is_any(), fewer, lambda: (legal, maxima))
    if approximate:
        scores, index = _few_of_each(logits, allowed, beams.scores, norm, width, approximate)
    else:
        scores, index = _best(logits, allowed, maxima, beams.scores, norm, width, block)
    beam, column = index // head.shape[0], index % head.shape[0]
    dead = jnp.isneginf(scores)
    beam = jnp.where(dead, 0, beam)
    child = jnp.where(dead, 0, children.child_of(beams.nodes, legal, beam, column))
    return scores, beam, child, jnp.where(dead, 0, column)


def _best(
    logits: jax.Array,
    allowed: jax.Array,
    maxima: jax.Array,
    scores: jax.Array,
    norm: jax.Array,
    width: int,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    batch, _, per_beam = maxima.shape
    logit_blocks = logits.reshape(batch, -1, block)
    word_blocks = allowed.reshape(batch, -1, block // WORD)

    def values(chosen: jax.Array) -> jax.Array:
        def of_beam(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, chosen // per_beam, axis=1)[..., None]

        x = jnp.take_along_axis(logit_blocks, chosen[..., None], axis=1)
        bits = _bits(jnp.take_along_axis(word_blocks, chosen[..., None], axis=1)).reshape(x.shape)
        return jnp.where(bits, of_beam(scores) + (x - of_beam(norm)), -jnp.inf)

    best = scores[..., None] + (maxima - norm[..., None])
    return select.top_of_blocks(best.reshape(batch, -1), values, block, width)


def _few_of_each(
    logits: jax.Array, allowed: jax.Array, scores: jax.Array, norm: jax.Array, width: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """Take at most k children of each beam (XGR-2 with K < BW), which is not exact."""
    batch, beams, vocabulary = logits.shape
    best, column = jax.lax.top_k(_masked(logits, allowed).reshape(logits.shape), min(k, vocabulary))
    flat = (scores[..., None] + (best - norm[..., None])).reshape(batch, -1)
    flat = jnp.pad(flat, ((0, 0), (0, max(0, width - flat.shape[1]))), constant_values=-jnp.inf)
    column = column + vocabulary * jnp.arange(beams, dtype=jnp.int32)[:, None]
    values, at = jax.lax.top_k(flat, width)
    at = jnp.minimum(at, column[0].size - 1)
    return values, jnp.take_along_axis(column.reshape(batch, -1), at, axis=-1)


def _packed(
    hidden: jax.Array,
    head: jax.Array,
    beams: _Beams,
    level: TreeLevel,
    filters: StepFilter | None,
    width: int,
    capacity: int,
) -> Step:
    """All children of all beams in one row, each beam's at starts .. ends - 1; they fit into `capacity`."""
    batch, n_beams = beams.scores.shape
    block = min(select.BLOCK, capacity)
    chunk = min(_PACKED_CHUNK, -(-capacity // block) * block)
    size = -(-capacity // chunk) * chunk
    ends = jnp.cumsum(beams.nodes.degree, axis=1)
    starts, total = ends - beams.nodes.degree, ends[:, -1:]
    rows = jnp.arange(batch)[:, None]

    def owner_in(ends: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.searchsorted(ends, at, side="right", method="scan_unrolled")

    owner_of = jax.vmap(owner_in, (0, None))

    def some(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        logits, owners, most, mass = carry
        at = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        owner = jnp.minimum(owner_of(ends, at), n_beams - 1).astype(jnp.int32)
        child = _child(beams.nodes, starts, owner, at, level)
        logit = jnp.einsum(
            "bpd,bpd->bp",
            jnp.take_along_axis(hidden, owner[..., None], axis=1),
            head[level.codes[child]],
            preferred_element_type=jnp.float32,
        )
        logit = jnp.where(at < total, logit, -jnp.inf)
        higher = most.at[rows, owner].max(logit)
        mass = jnp.where(jnp.isneginf(most), 0.0, mass * jnp.exp(most - _finite(higher)))
        mass = mass.at[rows, owner].add(jnp.exp(logit - jnp.take_along_axis(_finite(higher), owner, axis=1)))
        logits = jax.lax.dynamic_update_slice_in_dim(logits, logit, i * chunk, axis=1)
        owners = jax.lax.dynamic_update_slice_in_dim(owners, owner, i * chunk, axis=1)
        return logits, owners, higher, mass

    nothing = jnp.full((batch, size), -jnp.inf, jnp.float32)
    empty = jnp.full((batch, n_beams), -jnp.inf, jnp.float32)
    state = nothing, jnp.zeros((batch, size), jnp.int32), empty, jnp.zeros_like(empty)
    logits, owners, most, mass = jax.lax.fori_loop(0, -(-total.max() // chunk), some, state)
    norm = beams.normalizer
    if norm is None:
        norm = _finite(most + jnp.log(mass))
    at = jnp.arange(size, dtype=jnp.int32)
    taken = at < total
    if filters is not None:
        narrow = filters
        taken &= jax.lax.cond(
            filters.is_any(),
            lambda: _packed_filter(beams.nodes, starts, owners, at, level, narrow),
            lambda: jnp.ones((batch, size), bool),
        )
    by_owner = jnp.take_along_axis(beams.scores, owners, axis=1), jnp.take_along_axis(norm, owners, axis=1)
    values = jnp.where(taken, by_owner[0] + (logits - by_owner[1]), -jnp.inf)
    scores, index = select.top_k(values, width, block)
    dead = jnp.isneginf(scores)
    index = jnp.where(dead, 0, index)
    parent = jnp.where(dead, 0, jnp.take_along_axis(owners, index, axis=1))
    child = jnp.where(dead, 0, _child(beams.nodes, starts, parent, index, level))
    return scores, parent, child, jnp.where(dead, 0, level.codes[child])


def _child(nodes: Nodes, starts: jax.Array, owner: jax.Array, at: jax.Array, level: TreeLevel) -> jax.Array:
    """The child of beam `owner` that stands at place `at` of the packed row."""
    child = jnp.take_along_axis(nodes.first - starts, owner, axis=1) + at
    return jnp.clip(child, 0, level.codes.shape[0] - 1)


def _packed_filter(
    nodes: Nodes, starts: jax.Array, owners: jax.Array, at: jax.Array, level: TreeLevel, filters: StepFilter
) -> jax.Array:
    """Which children of the packed row may be taken: [B, size] bool."""
    batch, size = owners.shape
    rows = jnp.arange(batch)[:, None]
    to_row = jnp.pad(starts - nodes.first, ((0, 0), (0, 1)))

    def mark(listed: jax.Array, beam: jax.Array, child: jax.Array) -> jax.Array:
        place = jnp.take_along_axis(to_row, beam, axis=1) + child
        place = jnp.where(beam < nodes.first.shape[1], place, size)
        return listed.at[rows, place].set(True, mode="drop")

    listed = children.each_listed(level, nodes, filters, mark, jnp.zeros((batch, size), bool))
    allowed = listed == filters.only[:, None]
    return allowed & children.in_segment(filters, _child(nodes, starts, owners, at, level))


def legal_logsumexp(logits: jax.Array, legal: jax.Array, most: jax.Array) -> jax.Array:
    """Log-sum-exp [B, W] of those logits [B, W, V] whose bit in legal is set; 0 where none is. most: their maximum."""
    mass = exp_negative(_masked(logits, legal) - _finite(most)[..., None, None]).sum(axis=(-1, -2))
    return _finite(most + jnp.log(mass))


def largest_legal(logits: jax.Array, legal: jax.Array) -> jax.Array:
    """The largest of those logits [B, W, V] whose bit in legal is set: [B, W]."""
    return _masked(logits, legal).max(axis=(-1, -2))


def _block_maxima(logits: jax.Array, words: jax.Array, block: int) -> jax.Array:
    batch, width, vocabulary = logits.shape
    return _masked(logits, words).reshape(batch, width, vocabulary // block, block).max(axis=-1)


def _masked(logits: jax.Array, words: jax.Array) -> jax.Array:
    """The logits as [B, W, V / 32, 32], -inf where the bit is not set."""
    return jnp.where(_bits(words), logits.reshape(*words.shape, WORD), -jnp.inf)


def _bits(words: jax.Array) -> jax.Array:
    return (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1 > 0


def _finite(x: jax.Array) -> jax.Array:
    """x with 0 in place of -inf, so that differences are numbers; NaN stays NaN."""
    return jnp.where(jnp.isneginf(x), 0.0, x)
