# SPDX-License-Identifier: Apache-2.0
"""Train a decoder that answers by the letter of a candidate's place (rank.method=list_letter), in plain order.

The prompts are those of `jgr.training.plain_ranker`, and what is served: the score of the n-th candidate is the logit
of the n-th letter after the instruction. A letter says nothing of an item, so the answer has to be read from the
candidates in the prompt, and these have to be read after the history and each other. (With rank.method=item_token the
history alone names the answer, and such a decoder soon reads nothing else.)

To answer, the last layer has to look from the instruction for the candidate that is meant and to copy the letter that
its end has read off its label (rank.label). Nothing of that is of use without the rest, so a small model finds none of
it in thousands of steps; each part has a loss of its own, of equal weight, a mean over what a prompt has of it:
- place: at the end of every candidate, the letter of its place;
- which: at the instruction's last token the candidate that is meant, by its own token;
- look: the candidate that is meant, by the attention of half of the last layer's heads from there to the candidates'
  ends;
- answer: the softmax over the letters of the prompt's candidates, at the instruction's last token;
- copy: the cross-entropy of the answer's softmax with that of the next item among the candidates, at the end of the
  history, which is taken as it is: an answer is mostly a matter of luck, which copy is not;
- next item: at the end of every history item the next one among all, as in the other layouts;
- match: at the end of every candidate, how much the prompt's first token is expected there; the softmax over the
  candidates, of which one is the target.
Place, which and match are read off the layer before the last one. Answer and copy count as far as places are known:
before that there is nothing to answer with, and what a model learns of guessing is in the way. A share of the prompts
(train.lookups) names the target itself, so that only its letter is asked: that is learnt first.

With train.retrieved the candidates are a retriever's best in its order, as in service, and a prompt whose target is not
among them is one more that names it. Without it most candidates can be a retriever's best (train.hard_negatives) and
the target seldom is one: it is then known by being unlike the others, which is wrong where all are the retriever's.

Every item of a user's sequence but the first is a target, with the items before it as the history; candidates that are
drawn stand in an order of chance.

Letters: B batch, N history items, C candidates, T tokens, D hidden, L layers.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError, TrainConfig
from jgr.data.interactions import Ragged
from jgr.models import decoder
from jgr.models.decoder import DecoderConfig, DecoderParams, Dropout
from jgr.ops.rms_norm import rms_norm
from jgr.ops.segment_attention import Causal
from jgr.prompt.candidates import LAST, SegmentPrompts
from jgr.prompt.layouts import CAUSAL, Layout, Tokens
from jgr.prompt.tokens import Tokenizer
from jgr.training import plain_ranker, ranker
from jgr.training.plain_ranker import PlainText, Prompts
from jgr.training.trainer import Loss, dropout
from jgr.training.windows import Batches

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

METHOD = "list_letter"
QUERIES = 96
"""Queries whose scores are computed at once: with all at a time half of the scores are of keys that nothing sees."""


class LetterText(NamedTuple):
    """plain: the tokens that prompts are made of. letters: [C], the token of each place."""

    plain: PlainText
    letters: Any


class Answers(NamedTuple):
    """scores: [B, C] float32, -inf for no candidate. read: [B, N, D], at the ends of the history's items. ends: [B, N],
    as in Prompts. named, which: [B, C], the logits of the candidates' own tokens at the history's end and at the
    instruction's. look: [B, H, C], the attention of the last layer's heads from there to the candidates' ends, before
    its softmax. match: [B, C] and place: [B, C, C], the logits at these ends. All but place: -inf for no candidate."""

    scores: jax.Array
    read: jax.Array
    ends: jax.Array
    named: jax.Array
    which: jax.Array
    look: jax.Array
    match: jax.Array
    place: jax.Array


def is_asked(config: Config) -> bool:
    """Whether train.model=ranker learns to answer by letters."""
    return config.train.layouts == CAUSAL.name and config.rank.method == METHOD


def prompt_text(config: Config, tokenizer: Tokenizer, catalog: Catalog) -> LetterText:
    """The tokens of the configured prompts. Raises ConfigError or PromptError if a ranker cannot be trained on them."""
    count = 1 + config.train.negatives
    if config.rank.candidates < count:
        raise ConfigError(
            f"rank.candidates ({config.rank.candidates}) must be at least 1 + train.negatives, {count}: each has a "
            "letter"
        )
    if config.train.layers < 2:
        raise ConfigError(
            "train.layers: a ranker that learns letters needs two: one finds a candidate, the next copies its letter"
        )
    plain = plain_ranker.prompt_text(config, tokenizer, catalog, (METHOD,))
    if config.train.lookups and LAST not in plain.instruction:
        raise ConfigError("train.lookups: rank.instruction must have {last}, which names the target there")
    segments = SegmentPrompts(config.rank, tokenizer, catalog)
    return LetterText(plain, segments.columns(np.arange(count, dtype=np.int32))[0])


def candidate_ends(text: PlainText, prompts: Prompts, candidates: jax.Array) -> jax.Array:
    """The place of each candidate's last token in its prompt, [B, C]; that of an earlier one where there is none."""
    of_labels, own = plain_ranker.candidate_lengths(text, candidates)
    lengths = of_labels + own
    begin = prompts.lengths - len(text.instruction) - lengths.sum(1)
    return begin[:, None] + jnp.cumsum(lengths, axis=1) - 1


def answers(
    weights: DecoderParams,
    model: DecoderConfig,
    text: LetterText,
    history: jax.Array,
    candidates: jax.Array,
    last: jax.Array | None = None,
    *,
    drop: Dropout | None = None,
    key: jax.Array | None = None,
    compute: str = "float32",
) -> Answers:
    """What the losses and the scores are made of. history: [B, N], -1 on the right, not empty. candidates: [B, C], -1
    for none, which are last. last: see `plain_ranker.lay_out`. compute: the type of the layers' arithmetic; all logits
    are float32."""
    plain, letters = text.plain, jnp.asarray(text.letters)[: candidates.shape[1]]
    prompts = plain_ranker.lay_out(plain, history, candidates, last)
    typed = weights if compute == "float32" else jax.tree.map(lambda x: x.astype(compute), weights)
    found = decoder.prefill(
        typed, model, prompts.tokens, prompts.lengths, dropout=drop, key=key, attention=attention,
        keep_layers=True,
    )  # fmt: skip
    assert found.layers is not None

    def at(hidden: jax.Array, places: jax.Array) -> jax.Array:
        read = jnp.take_along_axis(hidden, jnp.maximum(places, 0)[..., None], axis=1)
        return read.astype(jnp.float32)

    rows, real = weights.output_rows, candidates >= 0
    own = rows[jnp.asarray(plain.own)[jnp.maximum(candidates, 0)]]
    asking, ends = prompts.lengths[:, None] - 1, candidate_ends(plain, prompts, candidates)
    inner = found.layers[model.layers - 2]
    inner_asking, inner_ends = at(inner, asking), at(inner, ends)
    normed_asking, normed_ends = (
        rms_norm(x, weights.norm, model.norm_eps) for x in (inner_asking, inner_ends)
    )
    layer = jax.tree.map(lambda x: x[-1], weights.layers)
    queries, _, _ = decoder.heads_of(model, layer, inner_asking, decoder.rotations(model, asking))
    _, keys, _ = decoder.heads_of(model, layer, inner_ends, decoder.rotations(model, ends))
    keys = jnp.repeat(keys, model.heads // model.kv_heads, axis=2)
    look = jnp.einsum("bqhd,bchd->bhc", queries, keys) / math.sqrt(model.head_dim)
    lived = at(found.hidden, prompts.ends.max(1, keepdims=True))
    return Answers(
        jnp.where(real, at(found.hidden, asking)[:, 0] @ rows[letters].T, -jnp.inf),
        at(found.hidden, prompts.ends),
        prompts.ends,
        jnp.where(real, jnp.einsum("bqd,bcd->bc", lived, own), -jnp.inf),
        jnp.where(real, jnp.einsum("bqd,bcd->bc", normed_asking, own), -jnp.inf),
        jnp.where(real[:, None], look, -jnp.inf),
        jnp.where(real, normed_ends @ rows[jnp.asarray(plain.prefix)[0]], -jnp.inf),
        normed_ends @ rows[letters].T,
    )


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens | Causal, layout: Layout | jax.Array
) -> jax.Array:
    """Causal attention of whole prompts, so many queries at a time and the keys up to the last of them, in the type of
    its arguments. Padding stands after the prompts, so nothing sees it. See jgr.models.decoder.Attention."""
    del tokens, layout
    keys, values, length = k.swapaxes(1, 2), v.swapaxes(1, 2), q.shape[1]
    causal = np.tri(length, dtype=bool)
    parts = [
        jax.nn.dot_product_attention(
            q[:, at:end], keys[:, :end], values[:, :end], mask=causal[None, None, at:end, :end],
            implementation="xla",
        )
        for at, end in ((at, min(at + QUERIES, length)) for at in range(0, length, QUERIES))
    ]  # fmt: skip
    return jnp.concatenate(parts, axis=1)


def letter_loss(
    model: DecoderConfig,
    text: LetterText,
    log_weights: ranker.OfItems,
    train: TrainConfig,
    scores_of: ranker.OfItems | None = None,
) -> Loss:
    """The loss over windows [B, N + 1], whose last items are the targets. scores_of: train.retriever's scores, of which
    the candidates are the best with train.retrieved."""

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidates_key, order_key, named_key, dropout_key = jax.random.split(key, 4)
        batch = len(rows)
        cut = (rows >= 0).sum(1) - 1
        history, targets = ranker.history_and_targets(rows, cut)
        candidates = ranker.draw_shuffled(
            (candidates_key, order_key), log_weights(history), history, targets, train.negatives
        )
        drop = None if train.dropout == 0 else lambda x, k: dropout(x, k, train.dropout)
        told = jax.random.bernoulli(named_key, train.lookups, (batch,))
        if scores_of is not None:
            best, listed = jax.lax.top_k(scores_of(history), 1 + train.negatives)
            among = (listed == targets[:, None]).any(1) & (best > -jnp.inf).all(1)
            candidates = jnp.where(among[:, None], listed, candidates)
            told |= ~among
        last = jnp.where(told, targets, jnp.take_along_axis(rows, cut[:, None] - 1, axis=1)[:, 0])
        found = answers(
            weights, model, text, history, candidates, last, drop=drop,
            key=None if drop is None else dropout_key, compute=train.compute,
        )  # fmt: skip
        real = candidates >= 0
        asked = real & (candidates == targets[:, None])

        def nats(scores: jax.Array) -> jax.Array:
            """The softmax's loss, [B]. scores: [B, C]."""
            return jax.nn.logsumexp(scores, axis=1) - jnp.where(asked, scores, 0.0).sum(1)

        beyond = jax.nn.logsumexp(found.scores, axis=1)[:, None] - found.scores
        places = jax.nn.logsumexp(found.place, axis=2) - jnp.diagonal(found.place, axis1=1, axis2=2)
        following = ranker.following_items(rows, cut)
        place = jnp.where(real, places, 0.0).sum(1) / real.sum(1)
        expected = jax.lax.stop_gradient(jax.nn.softmax(found.named, axis=1))
        copy = jnp.where(real, expected * jnp.where(real, beyond, 0.0), 0.0).sum(1)
        known = jax.lax.stop_gradient(jnp.clip(1 - place.mean() / math.log(1 + train.negatives), 0, 1))
        look = jax.vmap(nats, 1)(found.look[:, : (model.heads + 1) // 2]).mean(0)
        total = (
            known * (nats(found.scores) + jnp.where(told, 0.0, copy))
            + nats(found.which)
            + look
            + nats(found.match)
            + place
        )
        return total.sum() + plain_ranker.next_item_nats(
            weights, text.plain, found.read, found.ends, following, train.devices
        ), jnp.float32(batch)

    return loss


class Targets(Batches):
    """Batches of [B, N + 1] rows, -1 on the right: the last is the target, the others are the items before it.

    An epoch has every item of every sequence but the first ones once. sequences: each user's rows in time order.
    """

    def __init__(self, sequences: Ragged, train: TrainConfig) -> None:
        self._sequences = sequences
        counts = np.maximum(np.asarray(sequences.lengths, np.int64) - 1, 0)
        if not counts.any():
            raise ConfigError("no user has two interactions: there is nothing to learn from")
        self._users = np.repeat(np.arange(len(counts)), counts)
        self._places = np.arange(len(self._users)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
        super().__init__(train, np.minimum(self._places, train.max_items) + 1)

    def digest(self) -> str:
        """The hash of the sequences; see Batches."""
        digest = hashlib.sha256()
        for sequence in self._sequences:
            digest.update(len(sequence).to_bytes(8, "little") + sequence.tobytes())
        return digest.hexdigest()[:16]

    def batch(self, step: int) -> Int32:
        """The targets of a step, [B, N + 1]."""
        _, _, chosen = self._place(step)
        rows = np.full((len(chosen), self._train.max_items + 1), -1, np.int32)
        for row, user, place in zip(rows, self._users[chosen], self._places[chosen], strict=True):
            window = self._sequences[user][max(0, place - self._train.max_items) : place + 1]
            row[: len(window)] = window
        return rows
