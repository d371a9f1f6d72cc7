# SPDX-License-Identifier: Apache-2.0
"""Train a decoder that answers by the letter of a candidate's place (rank.method=list_letter), in plain order.

The prompts are those of `jgr.training.plain_ranker`, and what is served: the score of the n-th candidate is the logit
of the n-th letter after the instruction. A letter says nothing of an item, so the answer has to be read from the
candidates in the prompt, and these have to be read after the history and each other. (With rank.method=item_token the
history alone names the answer, and such a decoder soon reads nothing else.)

Five losses of equal weight, all of them means over what a prompt has of them:
- answer: the softmax over the letters of the prompt's candidates, at the instruction's last token;
- next item: at the end of every history item the next one among all, as in the other layouts;
- match: at the end of every candidate, how much the prompt's first token is expected there; the softmax over the
  candidates, of which one is the target;
- place: at the end of every candidate, the letter of its place;
- copy: the cross-entropy of the answer's softmax with that of match, which is taken as it is.
Match and place are read off the layer before the last one, so that the last one finds an answer to copy. Without them a
prompt has one answer that tells one of twenty letters, and small models take very long to learn what a letter is. An
answer is mostly a matter of luck besides, which copy is not.

Every item of a user's sequence but the first is a target, with the items before it as the history; the candidates
stand in an order that is drawn for each prompt.

Letters: B batch, N history items, C candidates, T tokens, D hidden, L layers.
"""

from __future__ import annotations

import hashlib
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
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import CAUSAL, Layout, Tokens
from jgr.prompt.tokens import Tokenizer
from jgr.training import plain_ranker, ranker
from jgr.training.plain_ranker import PlainText, Prompts
from jgr.training.trainer import Loss, dropout
from jgr.training.windows import Batches

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

METHOD = "list_letter"


class LetterText(NamedTuple):
    """plain: the tokens that prompts are made of. letters: [C], the token of each place."""

    plain: PlainText
    letters: Any


class Answers(NamedTuple):
    """scores: [B, C] float32, -inf for no candidate. read: [B, N, D], at the ends of the history's items. ends: [B, N],
    as in Prompts. match: [B, C], -inf for no candidate, and place: [B, C, C], the logits at each candidate's end."""

    scores: jax.Array
    read: jax.Array
    ends: jax.Array
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
    plain = plain_ranker.prompt_text(config, tokenizer, catalog, (METHOD,))
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
    *,
    drop: Dropout | None = None,
    key: jax.Array | None = None,
    compute: str = "float32",
) -> Answers:
    """What the losses and the scores are made of. history: [B, N], -1 on the right, not empty. candidates: [B, C], -1
    for none, which are last. compute: the type of the layers' arithmetic; all logits are float32."""
    plain, letters = text.plain, jnp.asarray(text.letters)[: candidates.shape[1]]
    prompts = plain_ranker.lay_out(plain, history, candidates)
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
    last = at(found.hidden, prompts.lengths[:, None] - 1)[:, 0]
    before = at(found.layers[max(model.layers - 2, 0)], candidate_ends(plain, prompts, candidates))
    ends = rms_norm(before, weights.norm, model.norm_eps)
    return Answers(
        jnp.where(real, last @ rows[letters].T, -jnp.inf),
        at(found.hidden, prompts.ends),
        prompts.ends,
        jnp.where(real, ends @ rows[jnp.asarray(plain.prefix)[0]], -jnp.inf),
        ends @ rows[letters].T,
    )


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens | Causal, layout: Layout | jax.Array
) -> jax.Array:
    """Causal attention of whole prompts with all scores at once: a few large products, in the type of its arguments.
    Padding stands after the prompts, so nothing sees it. See jgr.models.decoder.Attention."""
    del tokens, layout
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    out: jax.Array = jax.nn.dot_product_attention(q, keys, values, is_causal=True, implementation="xla")
    return out


def letter_loss(
    model: DecoderConfig, text: LetterText, log_weights: ranker.LogWeights, train: TrainConfig
) -> Loss:
    """The loss over windows [B, N + 1], whose last items are the targets."""

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        candidates_key, order_key, dropout_key = jax.random.split(key, 3)
        batch = len(rows)
        cut = (rows >= 0).sum(1) - 1
        history, targets = ranker.history_and_targets(rows, cut)
        candidates = ranker.draw_shuffled(
            (candidates_key, order_key), log_weights(history), history, targets, train.negatives
        )
        drop = None if train.dropout == 0 else lambda x, k: dropout(x, k, train.dropout)
        found = answers(
            weights, model, text, history, candidates, drop=drop, key=None if drop is None else dropout_key,
            compute=train.compute,
        )  # fmt: skip
        real = candidates >= 0
        asked = real & (candidates == targets[:, None])

        def nats(scores: jax.Array) -> jax.Array:
            """The sum over prompts of the softmax's nats of the target. scores: [B, C]."""
            return (jax.nn.logsumexp(scores, axis=1) - jnp.where(asked, scores, 0.0).sum(1)).sum()

        expected = jax.lax.stop_gradient(jax.nn.softmax(found.match, axis=1))
        beyond = jax.nn.logsumexp(found.scores, axis=1)[:, None] - found.scores
        places = jax.nn.logsumexp(found.place, axis=2) - jnp.diagonal(found.place, axis1=1, axis2=2)
        following = ranker.following_items(rows, cut)
        total = (
            nats(found.scores)
            + nats(found.match)
            + jnp.where(real, expected * jnp.where(real, beyond, 0.0), 0.0).sum()
            + (jnp.where(real, places, 0.0).sum(1) / real.sum(1)).sum()
            + plain_ranker.next_item_nats(
                weights, text.plain, found.read, found.ends, following, train.devices
            )
        )
        return total, jnp.float32(batch)

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
