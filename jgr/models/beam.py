# SPDX-License-Identifier: Apache-2.0
"""Generation and ranking over a catalog's semantic ids, each as one program (XGR-1, XGR-2, XGR-13, XGR-18).

    recommend:  prefill -> step 1 over the root's children -> (decode -> step) x (depth - 1) -> leaves and scores
    rank:       prefill -> the same decodes with the candidates in the beams' place -> their log-likelihoods

The number of phases is the catalog's depth, fixed at trace time, so the host dispatches once and hears leaves and
scores only. The output head is multiplied for the level's columns alone; with normalize="full" once more for the
log-sum-exp over the whole vocabulary, so that scores compare with an unconstrained model's.

Letters: B batch, T tokens, W beams, C candidates, V_l vocabulary of level l, N_l tree nodes at depth l, D hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.data.prefix_tree import PrefixTree
from jgr.models import decoder
from jgr.models.decoder import BeamKV, ContextKV, DecoderConfig, DecoderParams
from jgr.ops.constrained_topk import BeamStep, constrained_topk
from jgr.ops.constrained_topk.xla import children_of

Normalize = Literal["valid", "full"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CatalogTables:
    """The catalog on the device.

    offsets: per level [N_l + 1] int32; codes: per level [N_{l+1}] int32 (XGR-8).
    paths: [leaves, depth] int32, the node at depth 1..depth of each leaf.
    tokens: per level [V_l] int32, the model's token of each code.
    head: per level [V_l, D], the output rows of those tokens.
    max_degrees: per level, the most children a node has (static).
    """

    offsets: tuple[Any, ...]
    codes: tuple[Any, ...]
    paths: Any
    tokens: tuple[Any, ...]
    head: tuple[Any, ...]
    max_degrees: tuple[int, ...] = field(metadata={"static": True})

    @property
    def depth(self) -> int:
        return len(self.codes)

    @property
    def n_leaves(self) -> int:
        return int(self.codes[-1].shape[0])


def catalog_tables(
    tree: PrefixTree, level_tokens: tuple[npt.NDArray[np.int32], ...], params: DecoderParams
) -> CatalogTables:
    """Place a prefix tree beside a model. level_tokens: per level [V_l], the model's token of each code."""
    tokens = tuple(jnp.asarray(t) for t in level_tokens)
    return CatalogTables(
        offsets=tuple(jnp.asarray(o) for o in tree.offsets),
        codes=tuple(jnp.asarray(c) for c in tree.codes),
        paths=jnp.asarray(tree.paths),
        tokens=tokens,
        head=tuple(decoder.head_rows(params)[t] for t in tokens),
        max_degrees=tree.max_degrees,
    )


class Beams(NamedTuple):
    """leaves [B, W] int32 and scores [B, W] float32, best first, -inf where dead; codes [B, W, depth] int32."""

    leaves: jax.Array
    scores: jax.Array
    codes: jax.Array


def _normalizer(params: DecoderParams, hidden: jax.Array, normalize: Normalize) -> jax.Array | None:
    """[..., D] -> [...] log-sum-exp over the whole vocabulary, or None: the children's own."""
    if normalize == "valid":
        return None
    return jax.nn.logsumexp(decoder.logits(params, hidden), axis=-1)


def _level_logits(tables: CatalogTables, level: int, hidden: jax.Array) -> jax.Array:
    return jnp.einsum("bwd,vd->bwv", hidden, tables.head[level], preferred_element_type=jnp.float32)


def _prompt(
    params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, ContextKV]:
    """The prompt's last hidden state [B, 1, D] and its shared keys and values."""
    out = decoder.prefill(params, cfg, tokens, lengths)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
    return last, out.context


@functools.partial(jax.jit, static_argnames=("cfg", "width", "normalize"))
def recommend(
    params: DecoderParams,
    tables: CatalogTables,
    tokens: jax.Array,
    lengths: jax.Array,
    widths: jax.Array,
    excluded: jax.Array,
    *,
    cfg: DecoderConfig,
    width: int,
    normalize: Normalize = "valid",
) -> Beams:
    """The best items of every request by beam search over the semantic ids that exist.

    Args:
        tokens: [B, T] int32 prompts, right padded; lengths: [B] int32.
        widths: [B] int32, each request's beam width, at most `width`; row b is exactly a search of widths[b] beams.
        excluded: [B, E] int32 leaves that must not be returned, n_leaves where unused. They are dropped at the last
            step, before the beams are chosen, and do not change the scores of the others.
    """
    batch = tokens.shape[0]
    hidden, context = _prompt(params, cfg, tokens, lengths)
    scores = jnp.zeros((batch, 1), jnp.float32)
    nodes = jnp.zeros((batch, 1), jnp.int32)
    codes = jnp.zeros((batch, 0, 1), jnp.int32)
    ancestors = jnp.zeros((batch, 0, 1), jnp.int32)
    beams: BeamKV | None = None
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    banned = jnp.zeros((batch, tables.n_leaves), bool)
    banned = banned.at[jnp.arange(batch)[:, None], excluded].set(True, mode="drop")
    for level in range(tables.depth):
        if level > 0:
            beams = decoder.empty_beam_kv(cfg, batch, width, context.k.dtype) if beams is None else beams
            ancestors = jnp.concatenate([ancestors, rows[:, None]], axis=1)
            chosen = tables.tokens[level - 1][codes[:, -1]]
            hidden, beams = decoder.decode(params, cfg, chosen, context, lengths, beams, ancestors)
        with jax.named_scope(f"beam_step_{level + 1}"):
            step: BeamStep = constrained_topk(
                _level_logits(tables, level, hidden),
                scores,
                nodes,
                tables.offsets[level],
                tables.codes[level],
                max_degree=tables.max_degrees[level],
                width=width,
                normalizer=_normalizer(params, hidden, normalize),
                banned=banned if level == tables.depth - 1 else None,
            )
            scores = jnp.where(rows < widths[:, None], step.scores, -jnp.inf)
            nodes = step.nodes
            codes = jnp.take_along_axis(codes, step.parents[:, None], axis=2)
            codes = jnp.concatenate([codes, step.codes[:, None]], axis=1)
            ancestors = jnp.take_along_axis(ancestors, step.parents[:, None], axis=2)
    return Beams(nodes, scores, codes.transpose(0, 2, 1))


@functools.partial(jax.jit, static_argnames=("cfg", "normalize"))
def rank(
    params: DecoderParams,
    tables: CatalogTables,
    tokens: jax.Array,
    lengths: jax.Array,
    leaves: jax.Array,
    *,
    cfg: DecoderConfig,
    normalize: Normalize = "valid",
) -> jax.Array:
    """Log-likelihood [B, C] float32 of given leaves [B, C] int32; the prompt is computed once for all of them.

    The score of a leaf is the score that `recommend` would give it.
    """
    hidden, context = _prompt(params, cfg, tokens, lengths)
    return score_leaves(params, tables, hidden, context, lengths, leaves, cfg=cfg, normalize=normalize)


def score_leaves(
    params: DecoderParams,
    tables: CatalogTables,
    hidden: jax.Array,
    context: ContextKV,
    lengths: jax.Array,
    leaves: jax.Array,
    *,
    cfg: DecoderConfig,
    normalize: Normalize,
    start: jax.Array | None = None,
) -> jax.Array:
    """Log-likelihood [B, C] of leaves [B, C] after a prompt given by its last hidden state [B, 1, D] and context.

    start: [B] int32, the position that follows the prompt; default lengths.
    """
    batch, candidates = leaves.shape
    paths = tables.paths[jnp.clip(leaves, 0, tables.n_leaves - 1)]  # [B, C, depth]
    rows = jnp.broadcast_to(jnp.arange(candidates, dtype=jnp.int32), (batch, candidates))
    beams = decoder.empty_beam_kv(cfg, batch, candidates, context.k.dtype)
    scores = jnp.zeros((batch, candidates), jnp.float32)
    nodes = jnp.zeros((batch, 1), jnp.int32)
    for level in range(tables.depth):
        if level > 0:
            chosen = tables.tokens[level - 1][tables.codes[level - 1][nodes]]
            ancestors = jnp.broadcast_to(rows[:, None], (batch, level, candidates))
            hidden, beams = decoder.decode(
                params, cfg, chosen, context, lengths, beams, ancestors, start=start
            )
        with jax.named_scope(f"score_{level + 1}"):
            level_logits = _level_logits(tables, level, hidden)
            normalizer = _normalizer(params, hidden, normalize)
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
    codes = tables.codes[level]
    child, own = children_of(nodes, tables.offsets[level], codes.shape[0], tables.max_degrees[level])
    values = jnp.take_along_axis(level_logits, codes[child], axis=-1)
    return jax.nn.logsumexp(jnp.where(own, values, -jnp.inf), axis=-1)
