# SPDX-License-Identifier: Apache-2.0
"""Which columns of a level's logits are children of a beam's node, and which of them a filter leaves (XGR-7, XGR-8).

The one idea: both are sets of columns, kept as one bit a column in [B, W, V / 32] words. A node with many children has
its words in a table; the others list a few codes. A filter lists the nodes that it empties, which are at most as many
as the items that it names, or has one bit for every node of a segment. So nothing here costs more for a larger catalog.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

WORD = 32
_LISTED_CHUNK = 256
NOBODY = 2**31 - 1

S = TypeVar("S")


class TreeLevel(NamedTuple):
    """One level of the prefix tree: N nodes, C children.

    offsets: [N + 1] int32; node n's children are offsets[n] .. offsets[n + 1] - 1 of the next level.
    codes: [C] int32, the column of each child, ascending within a node.
    wide_nodes: [n] int32, ascending, the nodes that have a bitmap; wide_bitmaps: [n, V / 32] uint32. See
    jgr.catalog.child_bitmaps.
    """

    offsets: jax.Array
    codes: jax.Array
    wide_nodes: jax.Array
    wide_bitmaps: jax.Array


class StepFilter(NamedTuple):
    """Which children of one level the requests of a batch may take.

    children: [B, E] int32, distinct listed nodes of the next level; parents: [B, E] int32, the node above each;
    counts: [B] int32, how many of the listed are no padding.
    only: [B] bool; True: nothing but the listed may be taken, False: everything else may.
    segment: [B] int32, the row of `segments` that a child must also be in.
    segments: [R, C / 32 rounded up, + 1] uint32, a bit for every node of the next level, row 0 all ones; or None.
    """

    children: jax.Array
    parents: jax.Array
    counts: jax.Array
    only: jax.Array
    segment: jax.Array
    segments: jax.Array | None = None

    def is_any(self) -> jax.Array:
        """Whether any request of the batch filters anything."""
        return jnp.any((self.counts > 0) | self.only | (self.segment > 0))


class Arguments(NamedTuple):
    """A call of constrained_topk, as all forms of the op take it; see constrained_topk for the fields."""

    hidden: jax.Array
    head: jax.Array
    beam_scores: jax.Array
    nodes: jax.Array
    level: TreeLevel
    width: int
    normalizer: jax.Array | None = None
    filters: StepFilter | None = None
    packed: int = 0
    approximate: int = 0


class Nodes(NamedTuple):
    """The beams' nodes [B, W], clamped to the table, their first children, and their degrees, 0 for dead beams."""

    node: jax.Array
    first: jax.Array
    degree: jax.Array


def nodes_of(level: TreeLevel, nodes: jax.Array, alive: jax.Array) -> Nodes:
    index = jnp.clip(nodes, 0, level.offsets.shape[0] - 2)
    first = level.offsets[index]
    return Nodes(index, first, jnp.where(alive, level.offsets[index + 1] - first, 0))


def legal_words(level: TreeLevel, nodes: Nodes, words: int) -> jax.Array:
    """[B, W, words] uint32: bit c % 32 of word c // 32 says whether column c is a child; nothing for dead beams."""
    at = jnp.searchsorted(level.wide_nodes, nodes.node, method="scan")
    at = jnp.minimum(at, level.wide_nodes.shape[0] - 1)
    alive = nodes.degree > 0
    wide = alive & (level.wide_nodes[at] == nodes.node)
    rows = jnp.where(wide[..., None], level.wide_bitmaps[at], jnp.uint32(0))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, words - rows.shape[-1])))
    few = jnp.where(wide, 0, nodes.degree)
    b, w = _grid(few.shape)

    def add(i: jax.Array, rows: jax.Array) -> jax.Array:
        slot = i * WORD + jnp.arange(WORD, dtype=jnp.int32)
        child = jnp.minimum(nodes.first[..., None] + slot, level.codes.shape[0] - 1)
        code = level.codes[child]
        bit = jnp.where(slot < few[..., None], _bit(code), jnp.uint32(0))
        return rows.at[b, w, code // WORD].add(bit)  # distinct bits: their sum is their union

    found: jax.Array = jax.lax.fori_loop(0, -(-few.max() // WORD), add, rows)
    return found


def narrowed(level: TreeLevel, nodes: Nodes, legal: jax.Array, filters: StepFilter) -> jax.Array:
    """The words of the children that a filter leaves, made from the words of all children."""
    batch = jnp.arange(legal.shape[0])[:, None]

    def mark(words: jax.Array, beam: jax.Array, child: jax.Array) -> jax.Array:
        code = level.codes[child]
        return words.at[batch, beam, code // WORD].add(_bit(code), mode="drop")

    listed = each_listed(level, nodes, filters, mark, jnp.zeros_like(legal))
    allowed = jnp.where(filters.only[:, None, None], listed, legal & ~listed)
    segments = filters.segments
    if segments is None:
        return allowed
    inside: jax.Array = jax.lax.cond(
        jnp.any(filters.segment > 0),
        lambda: allowed & _segment_words(nodes, legal, filters.segment, segments),
        lambda: allowed,
    )
    return inside


def each_listed(
    level: TreeLevel,
    nodes: Nodes,
    filters: StepFilter,
    mark: Callable[[S, jax.Array, jax.Array], S],
    state: S,
) -> S:
    """Hand all listed children to `mark`, a few at a time, with the beam that stands above each.

    mark(state, beam, child) -> state, with beam and child [B, n] int32; beam is W for padding, and where no beam
    stands above the child.
    """
    width = nodes.node.shape[1]
    keys = jnp.where(nodes.degree > 0, nodes.node, NOBODY)  # a dead beam claims no node
    beams = jnp.arange(width, dtype=jnp.int32)
    chunk = min(_LISTED_CHUNK, filters.children.shape[1])

    def some(i: jax.Array, state: S) -> S:
        at = jnp.minimum(i * chunk, filters.children.shape[1] - chunk)  # the last chunk stays inside
        entry = at + jnp.arange(chunk, dtype=jnp.int32)
        given = (entry >= i * chunk) & (entry < filters.counts[:, None])
        parents = jax.lax.dynamic_slice_in_dim(filters.parents, at, chunk, axis=1)
        children = jax.lax.dynamic_slice_in_dim(filters.children, at, chunk, axis=1)
        # The live beams' nodes are distinct: at most one stands above a child.
        above = jnp.where(parents[..., None] == keys[:, None], beams, -1).max(axis=-1)
        return mark(state, jnp.where(given & (above >= 0), above, width), children)

    last: S = jax.lax.fori_loop(0, -(-filters.counts.max() // chunk), some, state)
    return last


def in_segment(filters: StepFilter, child: jax.Array) -> jax.Array:
    """[B, n] bool: whether children [B, n] lie in their request's segment."""
    if filters.segments is None:
        return jnp.ones(child.shape, bool)
    word = filters.segments[filters.segment[:, None], child // WORD]
    return (word >> (child % WORD).astype(jnp.uint32)) & 1 > 0


def child_of(nodes: Nodes, legal: jax.Array, beam: jax.Array, column: jax.Array) -> jax.Array:
    """The child [B, n] that a column of a beam stands for: the bits before it in the beam's words are counted."""
    words = jnp.take_along_axis(legal, beam[..., None], axis=1)
    before = jnp.arange(words.shape[-1]) < column[..., None] // WORD
    full = jnp.where(before, _popcount(words), 0).sum(axis=-1)
    own = jnp.take_along_axis(words, column[..., None] // WORD, axis=-1)[..., 0]
    part = _popcount(own & (_bit(column) - 1))
    first: jax.Array = jnp.take_along_axis(nodes.first, beam, axis=1)
    return first + full + part


def _segment_words(nodes: Nodes, legal: jax.Array, segment: jax.Array, segments: jax.Array) -> jax.Array:
    """A segment's bits by column. They are kept by child, so 32 children at a time are laid on a word's set bits."""
    counts = _popcount(legal)
    at = nodes.first[..., None] + jnp.cumsum(counts, axis=-1) - counts
    word, shift = at // WORD, (at % WORD).astype(jnp.uint32)
    rows = segment[:, None, None]
    low = segments[rows, word] >> shift
    high = jnp.where(shift > 0, segments[rows, word + 1] << ((WORD - shift) % WORD), jnp.uint32(0))
    source, out = low | high, jnp.zeros_like(legal)
    for i in range(WORD):
        bit = (legal >> i) & 1
        out |= (bit & source) << i
        source = jnp.where(bit > 0, source >> 1, source)
    return out


def _popcount(words: jax.Array) -> jax.Array:
    return jax.lax.population_count(words).astype(jnp.int32)


def _bit(code: jax.Array) -> jax.Array:
    return jnp.left_shift(jnp.uint32(1), (code % WORD).astype(jnp.uint32))


def _grid(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    batch, width = shape
    return jnp.arange(batch)[:, None, None], jnp.arange(width)[:, None]
