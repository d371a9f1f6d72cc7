# SPDX-License-Identifier: Apache-2.0
"""Train a decoder that ranks candidates in prompts of plain order (train.layouts=causal): that of a language model, of
which `cache.policy=blocks` reuses parts (RcLLM).

A prompt is what the server builds: the history's items in their words (prompt.item), the candidates one after the
other, the instruction. The two losses are those of `jgr.training.ranker`: the softmax over the candidates at the
instruction's last token, and at the end of every history item the next item among all. The candidates stand in random
order, since here a place can be seen.

A prompt has at most the smallest of rank.tokens tokens: where it would have more, the history's first items are left
out.

Letters: B batch, N history items, H tokens of a history's item, C candidates, S item span, T tokens, n items in the
catalog, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError, TrainConfig
from jgr.models import decoder
from jgr.models.decoder import DecoderConfig, DecoderParams, Dropout
from jgr.prompt.candidates import LAST, SegmentPrompts
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens
from jgr.training import ranker
from jgr.training.softmax import softmax_nats
from jgr.training.trainer import Loss, dropout

NONE = np.zeros(0, np.int32)


class PlainText(NamedTuple):
    """The tokens that prompts are made of; see jgr.training.ranker.Text.

    events: [n, H], each row's tokens as an item of the history; event_lengths: [n], how many they are. labels: [C, t],
    the tokens before each candidate, and label_lengths: [C]. most: the most tokens of a prompt.
    """

    prefix: Any
    instruction: Any
    own: Any
    items: Any
    lengths: Any
    events: Any
    event_lengths: Any
    labels: Any
    label_lengths: Any
    most: int


class Prompts(NamedTuple):
    """tokens: [B, T]. lengths: [B]. ends: [B, N], the place of the last token of each history item; -1: it is not
    there."""

    tokens: jax.Array
    lengths: jax.Array
    ends: jax.Array


def prompt_text(
    config: Config, tokenizer: Tokenizer, catalog: Catalog, methods: tuple[str, ...] = ("item_token",)
) -> PlainText:
    """The tokens of the configured prompts. methods: what rank.method may be. Raises ConfigError or PromptError if a
    ranker cannot be trained on them."""
    prompt, rank = config.prompt, config.rank
    if rank.method not in methods:
        raise ConfigError(
            f"train.model=ranker: rank.method must be {' or '.join(methods)}, not {rank.method}"
        )
    if catalog.depth != 1:
        raise ConfigError(
            f"train.model=ranker: needs a catalog whose semantic ids are one token, not {catalog.depth}"
        )
    segments, builder = SegmentPrompts(rank, tokenizer, catalog), PromptBuilder(prompt, tokenizer, catalog)
    if prompt.separator or builder.review_tokens or not prompt.template.endswith("{history}"):
        raise ConfigError(
            "train.layouts=causal: takes no prompt.separator, no {review} in prompt.item, and a prompt.template that "
            "ends in {history}"
        )
    rows = np.arange(catalog.n_items, dtype=np.int32)
    items, lengths = ranker.listed([segments.item(row) for row in rows.tolist()])
    events, event_lengths = ranker.listed([builder.item_tokens(row) for row in rows.tolist()])
    count = 1 + config.train.negatives
    if rank.label and rank.candidates < count:
        raise ConfigError(
            f"rank.candidates ({rank.candidates}) must be at least 1 + train.negatives, {count}"
        )
    labels, label_lengths = ranker.listed([x.tokens for x in segments.labels[:count]] or [NONE] * count)
    most, fixed = min(rank.tokens), len(builder.prefix) + len(segments.instruction)
    needed = fixed + events.shape[1] + count * (labels.shape[1] + items.shape[1])
    if needed > most:
        raise ConfigError(
            f"rank.tokens: a prompt of one item and 1 + train.negatives candidates can have {needed} tokens, more than "
            f"{most}"
        )
    if not len(builder.prefix):
        raise ConfigError("train.model=ranker: prompt.template must have something before {history}")
    own = level_tokens(catalog, tokenizer, tokenizer.vocab_size)[0][catalog.codes[:, 0]]
    of_events, of_labels = (events, event_lengths), (labels, label_lengths)
    return PlainText(builder.prefix, segments.instruction, own, items, lengths, *of_events, *of_labels, most)


def lay_out(
    text: PlainText, history: jax.Array, candidates: jax.Array, last: jax.Array | None = None
) -> Prompts:
    """Prompts as `decoder.prefill` takes them. history: [B, N], -1 on the right, not empty. candidates: [B, C], -1 for
    none. last: [B], the items that the instructions name; default those that end the histories."""
    batch = len(history)
    prefix, instruction = jnp.asarray(text.prefix), jnp.asarray(text.instruction)
    of_labels, lengths = candidate_lengths(text, candidates)
    of_events = jnp.where(history >= 0, jnp.asarray(text.event_lengths)[jnp.maximum(history, 0)], 0)
    room = text.most - len(prefix) - len(instruction) - (of_labels + lengths).sum(1)
    to_end = jnp.cumsum(of_events[:, ::-1], axis=1)[:, ::-1]
    kept = (history >= 0) & (to_end <= room[:, None])
    of_events = jnp.where(kept, of_events, 0)
    if last is None:
        last = jnp.take_along_axis(history, (history >= 0).sum(1)[:, None] - 1, axis=1)[:, 0]
    asks = jnp.where(instruction == LAST, jnp.asarray(text.own)[last][:, None], instruction)

    def grid(*columns: tuple[Any, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Tokens of rows one after the other, [B, rows * width], and which of them are there. Each column: tokens by
        row, the rows [B, rows], and how many tokens they have."""
        tokens = [jnp.asarray(table)[jnp.maximum(rows, 0)] for table, rows, _ in columns]
        real = [
            jnp.arange(of.shape[2]) < sizes[..., None]
            for of, (_, _, sizes) in zip(tokens, columns, strict=True)
        ]
        first, second = (jnp.concatenate(x, axis=2).reshape(batch, -1) for x in (tokens, real))
        return first, second

    places = jnp.broadcast_to(jnp.arange(candidates.shape[1]), candidates.shape)
    every = [
        (jnp.broadcast_to(prefix, (batch, len(prefix))), jnp.ones((batch, len(prefix)), bool)),
        grid((text.events, history, of_events)),
        grid((text.labels, places, of_labels), (text.items, candidates, lengths)),
        (asks, jnp.ones(asks.shape, bool)),
    ]
    tokens, real = (jnp.concatenate(parts, axis=1) for parts in zip(*every, strict=True))
    order = jnp.argsort(~real, axis=1, stable=True)[:, : text.most]
    ends = jnp.where(kept, len(prefix) + jnp.cumsum(of_events, axis=1) - 1, -1)
    return Prompts(jnp.take_along_axis(tokens, order, axis=1), real.sum(1, dtype=jnp.int32), ends)


def candidate_lengths(text: PlainText, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of tokens of the label before each of the candidates [B, C], and of its own, [B, C]; 0 for none."""
    real = candidates >= 0
    of_labels = jnp.where(real, jnp.asarray(text.label_lengths)[: candidates.shape[1]], 0)
    return of_labels, jnp.where(real, jnp.asarray(text.lengths)[jnp.maximum(candidates, 0)], 0)


def candidate_scores(
    weights: DecoderParams,
    model: DecoderConfig,
    text: PlainText,
    history: jax.Array,
    candidates: jax.Array,
    *,
    drop: Dropout | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The candidates' scores [B, C] float32, -inf for none, and the hidden states [B, N, D] at the ends of the
    history's items."""
    prompts = lay_out(text, history, candidates)
    hidden = decoder.prefill(
        weights, model, prompts.tokens, prompts.lengths, dropout=drop, key=key, attention="xla"
    ).hidden
    at_end = jnp.take_along_axis(hidden, prompts.lengths[:, None, None] - 1, axis=1)[:, 0]
    columns = weights.output_rows[jnp.asarray(text.own)[jnp.maximum(candidates, 0)]]
    scores = jnp.einsum("bd,bcd->bc", at_end, columns)
    read = jnp.take_along_axis(hidden, jnp.maximum(prompts.ends, 0)[..., None], axis=1)
    return jnp.where(candidates >= 0, scores, -jnp.inf), read


def ranking_loss(
    model: DecoderConfig, text: PlainText, log_weights: ranker.OfItems, train: TrainConfig
) -> Loss:
    """The loss over windows [B, N + 1]. Each is cut at a random item, the target; late items are likelier."""

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut_key, candidates_key, order_key, dropout_key = jax.random.split(key, 4)
        batch = len(rows)
        cut = ranker.cuts(cut_key, rows)
        history, targets = ranker.history_and_targets(rows, cut)
        candidates = ranker.draw_shuffled(
            (candidates_key, order_key), log_weights(history), history, targets, train.negatives
        )
        drop = None if train.dropout == 0 else lambda x, k: dropout(x, k, train.dropout)
        scores, read = candidate_scores(
            weights, model, text, history, candidates, drop=drop, key=None if drop is None else dropout_key
        )
        asked = (candidates == targets[:, None]) & (candidates >= 0)
        nats = jax.nn.logsumexp(scores, axis=1) - jnp.where(asked, scores, 0.0).sum(1)
        following = ranker.following_items(rows, cut)
        ends = lay_out(text, history, candidates).ends
        next_item = next_item_nats(weights, text, read, ends, following, train.devices)
        return nats.sum() + next_item, jnp.float32(batch)

    return loss


def next_item_nats(
    weights: DecoderParams,
    text: PlainText,
    read: jax.Array,
    ends: jax.Array,
    following: jax.Array,
    devices: int,
) -> jax.Array:
    """The nats of the next item among all, the mean over a prompt's history, summed over the prompts, [] float32.

    read: [B, N, D], the hidden states at the ends of the history's items. ends: see Prompts. following: [B, N], the
    next items, -1 for none.
    """
    real = (following >= 0) & (ends >= 0)
    share = real / jnp.maximum(real.sum(axis=1, keepdims=True), 1)
    items = weights.output_rows[jnp.asarray(text.own)]
    return softmax_nats(read, items, jnp.maximum(following, 0), share, groups=devices)
