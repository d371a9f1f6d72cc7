# SPDX-License-Identifier: Apache-2.0
"""Generation and ranking over a catalog's semantic ids, each as one program (XGR-1, XGR-2, XGR-13, XGR-18).

    recommend:  begin -> step 1 over the root's children -> (advance -> step) x (depth - 1) -> leaves and scores
    rank:       begin -> the same advances with the candidates in the beams' place -> their log-likelihoods

begin (which reads the prompt) and advance (which adds one token to each beam) belong to the generator: see
jgr.models.generators. The number of phases is the catalog's depth, fixed at trace time, so the host dispatches once and
gets only leaves and scores back. The output head is multiplied only for the columns of the level, or of the beams'
children if these are few; with normalize="full" also for the log-sum-exp over the whole vocabulary, so that scores can
be compared with an unconstrained model's.

Letters: B batch, T tokens, W beams, C candidates, V_l vocabulary of level l, N_l tree nodes at depth l, D hidden,
E most nodes that a request's filter lists in a level.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.child_bitmaps import bitmap_words, wide_children
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models.devices import ONE, Devices
from jgr.models.generators import GeneratorConfig, GeneratorParams, generator
from jgr.ops.constrained_topk import BeamStep, StepFilter, TreeLevel, constrained_topk, packed_capacity
from jgr.ops.constrained_topk.children import legal_words, nodes_of
from jgr.ops.constrained_topk.xla import columns, largest_legal, legal_logsumexp
from jgr.ops.token_logits import token_logits

Normalize = Literal["valid", "full"]
MIN_CLASS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CatalogTables:
    """The catalog on the device.

    offsets: per level [N_l + 1] int32; codes: per level [N_{l+1}] int32 (XGR-8).
    wide_nodes, wide_bitmaps: per level, the nodes with many children (jgr.catalog.child_bitmaps).
    paths: [leaves, depth] int32, the node at depth 1..depth of each leaf.
    tokens: per level [V_l] int32, the model's token of each code.
    head: per level [V_l, D], the output rows of those tokens, padded with rows of no code to the number that
        constrained_topk.xla.columns gives.
    """

    offsets: tuple[Any, ...]
    codes: tuple[Any, ...]
    wide_nodes: tuple[Any, ...]
    wide_bitmaps: tuple[Any, ...]
    paths: Any
    tokens: tuple[Any, ...]
    head: tuple[Any, ...]

    @property
    def depth(self) -> int:
        return len(self.codes)

    @property
    def n_leaves(self) -> int:
        return int(self.codes[-1].shape[0])

    def level(self, level: int) -> TreeLevel:
        return TreeLevel(
            self.offsets[level], self.codes[level], self.wide_nodes[level], self.wide_bitmaps[level]
        )


def growth_class(n: int) -> int:
    """The size that n entries are padded to: 64, then four sizes in every doubling, so at most a quarter more."""
    step = 1 << max(0, (n - 1).bit_length() - 3)
    return max(MIN_CLASS, -(-n // step) * step)


def catalog_tables(
    tree: PrefixTree,
    level_tokens: tuple[npt.NDArray[np.int32], ...],
    params: GeneratorParams,
    *,
    growing: bool = False,
    devices: Devices = ONE,
) -> CatalogTables:
    """Place a prefix tree beside a model. level_tokens: per level [V_l], the model's token of each code.

    growing: pad every table to its growth class, so that catalogs of about one size share compiled programs. devices:
    the model's; the tables are whole on each.
    """

    def place(x: npt.NDArray[Any], fill: int = 0, more: int = 0) -> jax.Array:
        size = growth_class(len(x) - more) + more if growing else len(x)
        wider = [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)]
        placed: jax.Array = devices.place(np.pad(x, wider, constant_values=fill))
        return placed

    tokens = [np.pad(t, (0, columns(len(t)) - len(t))) for t in level_tokens]  # as the head is padded
    sizes = [len(padded if growing else t) for padded, t in zip(tokens, level_tokens, strict=True)]
    wide = [wide_children(*level) for level in zip(tree.offsets, tree.codes, sizes, strict=True)]
    return CatalogTables(
        offsets=tuple(
            place(o, fill=o[-1], more=1) for o in tree.offsets
        ),  # padding nodes, which have no children
        codes=tuple(place(c) for c in tree.codes),
        wide_nodes=tuple(place(nodes, fill=np.iinfo(np.int32).max) for nodes, _ in wide),
        wide_bitmaps=tuple(place(bitmaps) for _, bitmaps in wide),
        paths=place(tree.paths),
        tokens=tuple(devices.place(t[:size]) for t, size in zip(tokens, sizes, strict=True)),
        head=tuple(devices.rows(params.output_rows, t) for t in tokens),
    )


class Filters(NamedTuple):
    """The part of the catalog that each request may be given, as jgr.catalog.item_filters finds it.

    children: [B, depth, E] int32, nodes of depth l + 1 that are listed at level l; parents: [B, depth, E] int32, the
    nodes above them; counts: [B, depth] int32, how many there are.
    only: [B] bool; True: only listed nodes may be taken, False: they may not.
    segment: [B] int32, rows of `segments`; 0: every item. segments: per level [R, N_{l+1} / 32 rounded up, + 1] uint32,
    row 0 all ones; or None where the catalog has no segments.
    """

    children: Any
    parents: Any
    counts: Any
    only: Any
    segment: Any
    segments: tuple[Any, ...] | None = None

    def step(self, level: int) -> StepFilter:
        return StepFilter(
            self.children[:, level],
            self.parents[:, level],
            self.counts[:, level],
            self.only,
            self.segment,
            None if self.segments is None else self.segments[level],
        )


class Levels(NamedTuple):
    """The beams after each level of a search, best first; arrays of [B, depth, W], or of one request [depth, W].

    nodes: int32, in the prefix tree, at depth l + 1 for level l. parents: int32, which beam of the level before was
    continued; 0 at the first level. scores: float32, log-likelihoods so far; -inf for a dead beam, whose other numbers
    mean nothing.
    """

    nodes: Any
    parents: Any
    scores: Any


class Beams(NamedTuple):
    """The result of a search: leaves [B, W] int32 and scores [B, W] float32, best first; codes [B, W, depth] int32.

    The score of a beam that ended without an item is -inf. levels: how the search came there, where that was asked.
    """

    leaves: jax.Array
    scores: jax.Array
    codes: jax.Array
    levels: Levels | None = None


def _normalizer(
    params: GeneratorParams, cfg: GeneratorConfig, hidden: jax.Array, level: int, normalize: Normalize
) -> jax.Array | None:
    """Log-sum-exp [...] over all tokens of a level, legal or not, from hidden [..., D]. None: the children's own."""
    if normalize == "valid":
        return None
    return jax.nn.logsumexp(generator(cfg).next_logits(params, cfg, hidden, level)[0], axis=-1)


def _level_logits(tables: CatalogTables, level: int, hidden: jax.Array) -> jax.Array:
    return token_logits(hidden, tables.head[level])


@functools.partial(jax.jit, static_argnames=("cfg", "width", "normalize", "approximate", "levels"))
def recommend(
    params: GeneratorParams,
    tables: CatalogTables,
    tokens: jax.Array,
    lengths: jax.Array,
    widths: jax.Array,
    filters: Filters | None = None,
    *,
    cfg: GeneratorConfig,
    width: int,
    normalize: Normalize = "valid",
    approximate: int = 0,
    levels: bool = False,
) -> Beams:
    """The best items of every request by beam search over the semantic ids that exist.

    Args:
        tokens: [B, T] int32 prompts, right padded; lengths: [B] int32.
        widths: [B] int32, each request's beam width, at most `width`; row b is exactly a search of widths[b] beams.
        filters: what may be returned, None: everything. A node below which nothing may be returned is never taken,
            at any level, and the scores of the others are what they are without a filter: the search is that of the
            tree of what may be returned, with the normalizer of the whole tree.
        approximate: the most children that a step keeps of one beam; 0: all, the exact search.
        levels: whether the beams after every level are returned too.
    """
    hidden, state = generator(cfg).begin(params, cfg, tokens, lengths)
    return search(
        params,
        tables,
        hidden,
        state,
        widths,
        filters,
        cfg=cfg,
        width=width,
        normalize=normalize,
        approximate=approximate,
        levels=levels,
    )


def search(
    params: GeneratorParams,
    tables: CatalogTables,
    hidden: jax.Array,
    state: Any,
    widths: jax.Array,
    filters: Filters | None,
    *,
    cfg: GeneratorConfig,
    width: int,
    normalize: Normalize,
    approximate: int,
    levels: bool = False,
) -> Beams:
    """Search as `recommend` does, after prompts that are read already: hidden and state are what `begin` returned."""
    batch = widths.shape[0]
    model = generator(cfg)
    scores = jnp.zeros((batch, 1), jnp.float32)
    nodes = jnp.zeros((batch, 1), jnp.int32)
    codes = jnp.zeros((batch, 0, 1), jnp.int32)
    ancestors = jnp.zeros((batch, 0, 1), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    taken: list[Levels] = []
    for level in range(tables.depth):
        if level > 0:
            ancestors = jnp.concatenate([ancestors, rows[:, None]], axis=1)
            chosen = tables.tokens[level - 1][codes[:, -1]]
            hidden, state = model.advance(params, cfg, chosen, state, ancestors)
        with jax.named_scope(f"beam_step_{level + 1}"):
            step: BeamStep = constrained_topk(
                hidden,
                tables.head[level],
                scores,
                nodes,
                tables.level(level),
                width=width,
                normalizer=_normalizer(params, cfg, hidden, level, normalize),
                filters=None if filters is None else filters.step(level),
                packed=0 if level == 0 else packed_capacity(width, len(tables.tokens[level])),
                approximate=approximate,
            )
            scores = jnp.where(rows < widths[:, None], step.scores, -jnp.inf)
            nodes = step.nodes
            codes = jnp.take_along_axis(codes, step.parents[:, None], axis=2)
            codes = jnp.concatenate([codes, step.codes[:, None]], axis=1)
            ancestors = jnp.take_along_axis(ancestors, step.parents[:, None], axis=2)
            taken.append(Levels(nodes, step.parents, scores))
    told = Levels(*(jnp.stack(each, axis=1) for each in zip(*taken, strict=True))) if levels else None
    return Beams(nodes, scores, codes.transpose(0, 2, 1), told)


@functools.partial(jax.jit, static_argnames=("cfg", "normalize"))
def rank(
    params: GeneratorParams,
    tables: CatalogTables,
    tokens: jax.Array,
    lengths: jax.Array,
    leaves: jax.Array,
    *,
    cfg: GeneratorConfig,
    normalize: Normalize = "valid",
) -> jax.Array:
    """Log-likelihood [B, C] float32 of given leaves [B, C] int32; the prompt is computed once for all of them.

    The score of a leaf is the score that `recommend` would give it.
    """
    hidden, state = generator(cfg).begin(params, cfg, tokens, lengths)
    return score_leaves(params, tables, hidden, state, leaves, cfg=cfg, normalize=normalize)


def score_leaves(
    params: GeneratorParams,
    tables: CatalogTables,
    hidden: jax.Array,
    state: Any,
    leaves: jax.Array,
    *,
    cfg: GeneratorConfig,
    normalize: Normalize,
) -> jax.Array:
    """Log-likelihood [B, C] float32 of leaves [B, C] int32 after prompts that are read already, see `search`."""
    model = generator(cfg)
    batch, candidates = leaves.shape
    paths = tables.paths[jnp.clip(leaves, 0, tables.n_leaves - 1)]  # [B, C, depth]
    rows = jnp.broadcast_to(jnp.arange(candidates, dtype=jnp.int32), (batch, candidates))
    scores = jnp.zeros((batch, candidates), jnp.float32)
    nodes = jnp.zeros((batch, 1), jnp.int32)
    for level in range(tables.depth):
        if level > 0:
            chosen = tables.tokens[level - 1][tables.codes[level - 1][nodes]]
            ancestors = jnp.broadcast_to(rows[:, None], (batch, level, candidates))
            hidden, state = model.advance(params, cfg, chosen, state, ancestors)
        with jax.named_scope(f"score_{level + 1}"):
            level_logits = _level_logits(tables, level, hidden)
            normalizer = _normalizer(params, cfg, hidden, level, normalize)
            if normalizer is None:
                normalizer = _children_logsumexp(tables, level, level_logits, nodes)
            nodes = paths[:, :, level]
            level_logits = jnp.broadcast_to(level_logits, (batch, candidates, level_logits.shape[-1]))
            target = jnp.take_along_axis(level_logits, tables.codes[level][nodes][..., None], axis=-1)[..., 0]
            scores = scores + target - normalizer
    return scores


def _children_logsumexp(
    tables: CatalogTables, level: int, level_logits: jax.Array, nodes: jax.Array
) -> jax.Array:
    tree_level = tables.level(level)
    words = bitmap_words(level_logits.shape[-1])
    legal = legal_words(tree_level, nodes_of(tree_level, nodes, jnp.ones(nodes.shape, bool)), words)
    return legal_logsumexp(level_logits, legal, largest_legal(level_logits, legal))
