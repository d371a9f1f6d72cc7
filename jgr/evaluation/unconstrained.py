# SPDX-License-Identifier: Apache-2.0
"""What the catalog constraint is worth: the same model searched without it, and how much of that is no item.

The unconstrained search is a language model's plain beam search over the whole vocabulary, for as many steps as a
semantic id has levels. Its sequences, and those of the constrained search of the same width, go through one lookup in
the catalog; an invalid one is counted and keeps its place in the ranking, as a miss.

Letters: B batch, T tokens, W beams, V vocabulary, n examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config
from jgr.data.datasets import Dataset
from jgr.data.interactions import Examples
from jgr.evaluation.served import EvaluationError
from jgr.models import beam, checkpoint
from jgr.models.generators import GeneratorConfig, GeneratorParams, generator
from jgr.ops.constrained_topk import select
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

_MAX_BATCH = 32
_LOGITS_PER_BATCH = 1 << 26  # float32: 256 MiB
_SPAN = np.int64(1) << 31  # more than any token


@functools.partial(jax.jit, static_argnames=("cfg", "depth", "width"))
def search(
    params: GeneratorParams,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    cfg: GeneratorConfig,
    depth: int,
    width: int,
) -> tuple[jax.Array, jax.Array]:
    """Beam search for `depth` tokens after prompts [B, T], over all tokens that the model may give.

    Returns the sequences [B, W, depth] int32, best first, and their log-likelihoods [B, W] float32, -inf where there
    are fewer sequences than beams. Exact; equal scores: the lower beam first, then the lower token.
    """
    batch = tokens.shape[0]
    model = generator(cfg)
    hidden, state = model.begin(params, cfg, tokens, lengths)
    scores = jnp.zeros((batch, 1), jnp.float32)
    sequences = jnp.zeros((batch, 0, 1), jnp.int32)
    ancestors = jnp.zeros((batch, 0, 1), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    for level in range(depth):
        if level > 0:
            ancestors = jnp.concatenate([ancestors, rows[:, None]], axis=1)
            hidden, state = model.advance(params, cfg, sequences[:, -1], state, ancestors)
        logits, first = model.next_logits(params, cfg, hidden, level)
        scores, at = select.best_tokens(logits, scores, width)
        at = jnp.where(jnp.isneginf(scores), 0, at)
        parents, chosen = jnp.divmod(at, logits.shape[-1])
        sequences = jnp.take_along_axis(sequences, parents[:, None], axis=2)
        sequences = jnp.concatenate([sequences, first + chosen[:, None]], axis=1)
        ancestors = jnp.take_along_axis(ancestors, parents[:, None], axis=2)
    return sequences.transpose(0, 2, 1), scores


class Leaves:
    """Which leaf of the catalog a sequence of tokens names: a lookup that knows nothing of any search."""

    def __init__(self, tree: PrefixTree, tokens_of: Sequence[Int32]) -> None:
        """tokens_of: per level, the model's token of each code."""
        self._levels = []
        for offsets, codes, tokens in zip(tree.offsets, tree.codes, tokens_of, strict=True):
            parents = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
            keys = parents * _SPAN + tokens[codes]
            order = np.argsort(keys)
            self._levels.append((keys[order], order))

    def find(self, sequences: Int32) -> Int32:
        """The leaves [...] int32 of sequences [..., depth] of tokens; -1 where no item has that semantic id."""
        nodes = np.zeros(sequences.shape[:-1], np.int64)
        for level, (keys, children) in enumerate(self._levels):
            wanted = nodes * _SPAN + sequences[..., level]  # negative below a node that is not there
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            nodes = np.where(keys[at] == wanted, children[at], -1)
        return nodes.astype(np.int32)


class Share:
    """How many of the sequences that a search returned are no item: among all beams, and among the first k."""

    def __init__(self, width: int, ks: Sequence[int]) -> None:
        self._invalid, self._all = np.zeros(width, np.int64), np.zeros(width, np.int64)
        self._ks = ks

    def count(self, leaves: Int32, alive: Bool) -> None:
        """Add rankings [b, W] of leaves, -1 where invalid."""
        self._invalid += (alive & (leaves < 0)).sum(axis=0)
        self._all += alive.sum(axis=0)

    def to_json(self) -> dict[str, float]:
        shares = {f"share@{k}": self._invalid[:k].sum() / max(1, self._all[:k].sum()) for k in self._ks}
        invalid, total = int(self._invalid.sum()), int(self._all.sum())
        return {
            "sequences": total,
            "invalid": invalid,
            "share": invalid / max(1, total),
            **{name: float(share) for name, share in shares.items()},
        }


@dataclass(frozen=True, eq=False)
class Searched:
    """The unconstrained search's ranking, [n, top_k] rows, -1 where a sequence is no item; and both searches'
    shares."""

    ranked: Int32
    unconstrained: Share
    constrained: Share


def search_all(
    config: Config,
    dataset: Dataset,
    examples: Examples,
    ks: Sequence[int],
    *,
    exclude_history: bool = False,
    on_answers: Callable[[int], None] = lambda count: None,
) -> Searched:
    """Search with and without the constraint, beam.width beams each, with the weights of model.path.

    exclude_history: leave out the history's items from the finished rankings. on_answers: called with a number of
    examples.
    """
    folder, catalog = Path(config.model.path), dataset.catalog
    dtype = checkpoint.served_dtype(folder, config.model.dtype)
    cfg, params = checkpoint.load(folder, dtype, kind=config.model.quantize)
    own = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(own) if own.exists() else None
    tokens_of = level_tokens(catalog, tokenizer, cfg.vocab_size)
    tree = PrefixTree.build(catalog.codes)
    tables, leaves_of = beam.catalog_tables(tree, tokens_of, params), Leaves(tree, tokens_of)
    builder = PromptBuilder(config.prompt, tokenizer, catalog)
    prompts = [builder.build(history) for history in examples.histories]
    width, top_k = config.beam.width, max(ks)
    found = Searched(np.full((len(examples), top_k), -1, np.int32), Share(width, ks), Share(width, ks))
    batch = int(np.clip(_LOGITS_PER_BATCH // (width * cfg.vocab_size), 1, _MAX_BATCH))
    for chosen, tokens, lengths in _batches(prompts, batch, config.profiles.tokens):
        n = len(chosen)
        free = search(params, tokens, lengths, cfg=cfg, depth=catalog.depth, width=width)
        sequences, scores = (np.asarray(x)[:n] for x in free)
        leaves, alive = leaves_of.find(sequences), ~np.isneginf(scores)
        found.unconstrained.count(leaves, alive)
        for i, best, real in zip(chosen, leaves, alive, strict=True):
            hidden = examples.histories[i] if exclude_history else np.zeros(0, np.int32)
            rows = _rows(tree, best[real], top_k, config.beam.items_per_id, hidden)
            found.ranked[i, : len(rows)] = rows
        bound = beam.recommend(
            params, tables, tokens, lengths, np.full(batch, width, np.int32),
            cfg=cfg, width=width, normalize=config.beam.normalize, approximate=config.beam.approximate,
        )  # fmt: skip
        codes, scores = np.asarray(bound.codes)[:n], np.asarray(bound.scores)[:n]
        sequences = np.stack([tokens_of[level][codes[..., level]] for level in range(catalog.depth)], axis=-1)
        found.constrained.count(leaves_of.find(sequences), ~np.isneginf(scores))
        on_answers(n)
    return found


def _rows(tree: PrefixTree, leaves: Int32, top_k: int, per_leaf: int, hidden: Int32) -> Int32:
    """The first top_k places: the first rows of each leaf, per_leaf at most, without the hidden ones; -1 for an invalid
    leaf."""
    places: list[Int32] = []
    for leaf in leaves[: top_k + len(hidden)]:
        rows = tree.rows_of(leaf) if leaf >= 0 else np.array([-1], np.int32)
        places.append(rows[~np.isin(rows, hidden)][:per_leaf])
    return np.concatenate([np.zeros(0, np.int32), *places])[:top_k]


def _batches(
    prompts: Sequence[Int32], batch: int, sizes: Sequence[int]
) -> Iterator[tuple[npt.NDArray[np.int64], Int32, Int32]]:
    """(indices [b], tokens [batch, T], lengths [batch]), short prompts first; T is the least of sizes that fits."""
    order = np.argsort([len(prompt) for prompt in prompts], kind="stable")
    longest = len(prompts[order[-1]])
    if longest > sizes[-1]:
        raise EvaluationError(f"a prompt has {longest} tokens; the largest of profiles.tokens is {sizes[-1]}")
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        lengths = np.ones(batch, np.int32)
        lengths[: len(chosen)] = [len(prompts[i]) for i in chosen]
        tokens = np.zeros((batch, next(size for size in sizes if size >= lengths.max())), np.int32)
        for row, i in enumerate(chosen):
            tokens[row, : lengths[row]] = prompts[i]
        yield chosen, tokens, lengths
