# SPDX-License-Identifier: Apache-2.0
"""Train a decoder that ranks the candidates in its prompt, in both layouts or in one (BAT-1a, BAT-16).

It is trained on the prompt that the server would build, token for token, position for position: a history, the
candidates, the instruction. The loss is the softmax over the candidates' own tokens at the instruction's last token.
Each example has the candidates first with probability one half, unless train.layouts names one layout for all.

A second loss of equal weight predicts, from every history item, the next one among all items: the history is read
anyway, and one target per prompt would teach little. If the candidates come first, the history's last item has no such
target, since it sees the answer.

The candidates of an example are the target and train.negatives other items, without repeats and not in the history:
half drawn by popularity, half uniformly; with train.retriever, train.hard_negatives of them come from the
retriever's first TOP_K instead. The
target is listed first, which the model cannot see: all candidates have the same position, and none sees another.

Letters: B batch, N history items, C candidates, S item span, T tokens, n items in the catalog, p prefix, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError, TrainConfig
from jgr.data.datasets import Dataset
from jgr.data.interactions import Ragged
from jgr.data.prepared import TITLES
from jgr.models import decoder, retrievers
from jgr.models.decoder import Attention, DecoderConfig, DecoderParams, Dropout
from jgr.prompt.candidates import LAST, LISTS, SegmentPrompts, letter
from jgr.prompt.layouts import ITEM_PREFIX, USER_PREFIX, Kind, Tokens
from jgr.prompt.tokens import PromptBuilder, Tokenizer, semantic_id_tokenizer
from jgr.training.candidate_attention import candidate_attention
from jgr.training.softmax import softmax_nats
from jgr.training.trainer import Loss, dropout

Int32 = npt.NDArray[np.int32]

TOP_K = 100
"""How many of the retriever's best items negatives are drawn from."""

OfItems = Callable[[jax.Array], jax.Array]
"""Maps histories [B, N], -1 on the right, to a number of each item: the logarithm of its weight as a negative, [n] or
[B, n]; or its score, [B, n], -inf for the history's own items."""


class Text(NamedTuple):
    """The tokens that prompts are made of.

    prefix: [p]. instruction: [i], LAST stands for the last item's token. own: [n], each row's own token. items: [n, S],
    each row's tokens as a candidate; lengths: [n], how many they are.
    """

    prefix: Any
    instruction: Any
    own: Any
    items: Any
    lengths: Any

    @property
    def span(self) -> int:
        return int(self.items.shape[1])


def ranker_tokenizer(config: Config, catalog: Catalog) -> Tokenizer:
    """The dataset's title tokenizer, if it has one, with the items' tokens added, and the letters of lists."""
    path, rank = Path(config.data.path) / TITLES, config.rank
    letters = [letter(rank, n) for n in range(rank.candidates)] if rank.method in LISTS else []
    if config.data.kind != "prepared" or not path.exists():
        found = semantic_id_tokenizer(catalog)
        return found.with_tokens(letters) if letters else found
    names = [symbol for symbol in catalog.symbols[0] if isinstance(symbol, str)]
    return Tokenizer.from_file(path).with_tokens([*names, *letters])


def prompt_text(config: Config, tokenizer: Tokenizer, catalog: Catalog) -> Text:
    """The tokens of the configured prompts. Raises ConfigError or PromptError if a ranker cannot be trained on them."""
    prompt, rank = config.prompt, config.rank
    if rank.method != "item_token":
        raise ConfigError(f"train.model=ranker: rank.method must be item_token, not {rank.method}")
    if prompt.item != "{sid}" or prompt.separator:
        raise ConfigError(
            "train.model=ranker: a history's item must be its token alone: prompt.item={sid} and no "
            f"prompt.separator, not {prompt.item!r}, {prompt.separator!r}"
        )
    segments = SegmentPrompts(rank, tokenizer, catalog)
    rows = np.arange(catalog.n_items, dtype=np.int32)
    items, lengths = listed([segments.item(row) for row in rows.tolist()], rank.item_span)
    prefix = PromptBuilder(prompt, tokenizer, catalog).prefix
    if not len(prefix):
        raise ConfigError("train.model=ranker: prompt.template must have something before {history}")
    return Text(prefix, segments.instruction, segments.columns(rows)[0], items, lengths)


def listed(tokens: Sequence[Int32], width: int = 0) -> tuple[Int32, Int32]:
    """Tokens of each row, [n, width], 0 behind them, and how many they are, [n]. width: at least this."""
    lengths = np.array([len(each) for each in tokens], np.int32)
    table = np.zeros((len(tokens), max(width, int(lengths.max()))), np.int32)
    for row, each in enumerate(tokens):
        table[row, : len(each)] = each
    return table, lengths


def lay_out(
    text: Text, history: jax.Array, candidates: jax.Array, items_first: jax.Array
) -> tuple[jax.Array, Tokens, jax.Array]:
    """Prompts as `decoder.prefill` takes them: the tokens [B, T], their descriptions, and the queries' layouts.

    history: [B, N], -1 on the right, not empty. candidates: [B, C], -1 for none. items_first: [B] bool. In every layout
    the arrays hold user, candidates, instruction in this order, since attention goes by segment and position, not by
    index. The last token is the one whose output is read.
    """
    batch, count = candidates.shape
    before, suffix, span = len(text.prefix), len(text.instruction), text.span
    prefix = jnp.broadcast_to(jnp.asarray(text.prefix), (batch, before))
    events = jnp.asarray(text.own)[jnp.maximum(history, 0)]
    user = jnp.concatenate([prefix, events], axis=1)
    lived = (history >= 0).sum(axis=1)
    users = before + lived
    items = jnp.asarray(text.items)[jnp.maximum(candidates, 0)].reshape(batch, -1)
    lengths = jnp.where(candidates >= 0, jnp.asarray(text.lengths)[jnp.maximum(candidates, 0)], 0)
    last = jnp.take_along_axis(events, lived[:, None] - 1, axis=1)
    instruction = jnp.where(text.instruction == LAST, last, jnp.asarray(text.instruction))

    at_user, at_items = jnp.where(items_first, span, 0), jnp.where(items_first, 0, users)
    place = jnp.arange(span)
    real = (
        jnp.arange(user.shape[1]) < users[:, None],
        (place < lengths[..., None]).reshape(batch, -1),
        jnp.ones((batch, suffix), bool),
    )
    position = (
        at_user[:, None] + jnp.arange(user.shape[1]),
        at_items[:, None] + jnp.tile(place, count),
        (users + span)[:, None] + jnp.arange(suffix),
    )
    sizes = np.array([user.shape[1], count * span, suffix])
    kind = np.repeat([Kind.USER, Kind.ITEM, Kind.INSTRUCTION], sizes).astype(np.int32)
    segment = np.repeat(np.arange(count + 2, dtype=np.int32), [user.shape[1], *[span] * count, suffix])

    def every(row: npt.NDArray[np.int32]) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(row), (batch, len(row)))

    described = Tokens(
        jnp.where(jnp.concatenate(real, axis=1), 0, -1),
        every(segment),
        every(kind),
        every(np.arange(len(kind), dtype=np.int32)),
        jnp.concatenate(position, axis=1),
    )
    sees = jnp.where(items_first[:, None], ITEM_PREFIX.bits[kind], USER_PREFIX.bits[kind])
    return jnp.concatenate([user, items, instruction], axis=1), described, sees


def candidate_scores(
    weights: DecoderParams,
    model: DecoderConfig,
    text: Text,
    history: jax.Array,
    candidates: jax.Array,
    items_first: jax.Array,
    *,
    drop: Dropout | None = None,
    key: jax.Array | None = None,
    attention: str | Attention = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The candidates' scores [B, C] float32, -inf for none, and the prompts' hidden states [B, T, D]; see `lay_out`."""
    tokens, described, sees = lay_out(text, history, candidates, items_first)
    hidden = decoder.prefill(
        weights,
        model,
        tokens,
        tokens,
        segments=described,
        layout=sees,
        dropout=drop,
        key=key,
        attention=attention,
    ).hidden
    columns = weights.output_rows[jnp.asarray(text.own)[jnp.maximum(candidates, 0)]]
    scores = jnp.einsum("bd,bcd->bc", hidden[:, -1], columns)
    return jnp.where(candidates >= 0, scores, -jnp.inf), hidden


def popularity(sequences: Ragged, n_items: int) -> npt.NDArray[np.float32]:
    """Each item's probability as a negative, [n], sums to 1: half by its interactions, half uniform."""
    counts = sum((np.bincount(rows, minlength=n_items) for rows in sequences), np.zeros(n_items))
    weights: npt.NDArray[np.float32] = ((counts / counts.sum() + 1 / n_items) / 2).astype(np.float32)
    return weights


def retriever_scores(train: TrainConfig, catalog: Catalog) -> OfItems:
    """The scores of train.retriever. Raises UserError if it does not fit the dataset."""
    cfg, params = retrievers.load_for(Path(train.retriever), catalog.item_ids)
    if retrievers.timed(cfg):
        raise ConfigError(f"train.retriever: {train.retriever} depends on times, which no prompt has")
    if train.max_items > cfg.max_items:
        raise ConfigError(
            f"train.max_items ({train.max_items}) must be at most train.retriever's, {cfg.max_items}"
        )
    return lambda history: without(retrievers.scores_after(params, history, cfg=cfg), history)


def negative_weights(config: Config, dataset: Dataset, scores_of: OfItems | None = None) -> OfItems:
    """The weights by which negatives are drawn. scores_of: train.retriever's, if there is one."""
    n_items = dataset.catalog.n_items
    base = jnp.asarray(popularity(dataset.interactions.sequences, n_items))
    if scores_of is None:
        return lambda history: jnp.log(base)
    count, hard = min(TOP_K, n_items), config.train.hard_negatives

    def weights(history: jax.Array) -> jax.Array:
        scores = scores_of(history)
        found = jax.lax.top_k(scores, count)[1]
        share = jnp.broadcast_to(base * (1 - hard), scores.shape)
        return jnp.log(share.at[jnp.arange(len(history))[:, None], found].add(hard / count))

    return weights


def without(scores: jax.Array, history: jax.Array) -> jax.Array:
    """The scores [B, n], with -inf for the items of the histories [B, N]."""
    at = jnp.where(history >= 0, history, scores.shape[1])
    return scores.at[jnp.arange(len(history))[:, None], at].set(-jnp.inf, mode="drop")


def draw_candidates(
    key: jax.Array, log_weights: jax.Array, history: jax.Array, targets: jax.Array, negatives: int
) -> jax.Array:
    """Draw candidates, [B, 1 + negatives] rows: the target, then others without repeats; -1 if there are no more.

    The others are those with the largest Gumbel-perturbed weights, which is drawing without replacement.
    """
    shape = (len(targets), log_weights.shape[-1])
    drawn = without(log_weights + jax.random.gumbel(key, shape), history)
    drawn = drawn.at[jnp.arange(len(targets)), targets].set(jnp.inf)
    largest, found = jax.lax.top_k(drawn, 1 + negatives)
    return jnp.where(largest == -jnp.inf, -1, found).astype(jnp.int32)


def draw_shuffled(
    keys: tuple[jax.Array, jax.Array],
    log_weights: jax.Array,
    history: jax.Array,
    targets: jax.Array,
    negatives: int,
) -> jax.Array:
    """Draw candidates as `draw_candidates` does, in random order, those that are none behind. keys: of both draws."""
    drawn = draw_candidates(keys[0], log_weights, history, targets, negatives)
    place = jnp.where(drawn >= 0, jax.random.uniform(keys[1], drawn.shape), 2.0)
    return jnp.take_along_axis(drawn, jnp.argsort(place, axis=1), axis=1)


def history_and_targets(rows: jax.Array, cut: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What stands before the cuts [B] of windows [B, N + 1], as [B, N], -1 on the right; and at them, [B]."""
    before = jnp.arange(rows.shape[1] - 1) < cut[:, None]
    return jnp.where(before, rows[:, :-1], -1), jnp.take_along_axis(rows, cut[:, None], axis=1)[:, 0]


def following_items(rows: jax.Array, cut: jax.Array) -> jax.Array:
    """The next item of each item before the cuts [B] of windows [B, N + 1], as [B, N], -1 on the right."""
    return jnp.where(jnp.arange(rows.shape[1] - 1) < cut[:, None], rows[:, 1:], -1)


def cuts(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Where each window [B, N + 1] is cut, [B]: the place of its target. Late ones are likelier."""
    most = (rows >= 0).sum(axis=1) - 1
    fraction = jnp.sqrt(jax.random.uniform(key, (len(rows),)))
    return jnp.clip(1 + jnp.floor(fraction * most).astype(jnp.int32), 1, most)


def ranking_loss(model: DecoderConfig, text: Text, log_weights: OfItems, train: TrainConfig) -> Loss:
    """The loss over windows [B, N + 1]. Each is cut at a random item, the target; late items are likelier."""

    def loss(weights: DecoderParams, rows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut_key, candidates_key, layout_key, dropout_key = jax.random.split(key, 4)
        batch, cut = len(rows), cuts(cut_key, rows)
        history, targets = history_and_targets(rows, cut)
        candidates = draw_candidates(candidates_key, log_weights(history), history, targets, train.negatives)
        if train.layouts == "both":
            items_first = jax.random.bernoulli(layout_key, 0.5, (batch,))
        else:
            items_first = jnp.full((batch,), train.layouts == ITEM_PREFIX.name)
        drop = None if train.dropout == 0 else lambda x, k: dropout(x, k, train.dropout)
        scores, hidden = candidate_scores(
            weights,
            model,
            text,
            history,
            candidates,
            items_first,
            drop=drop,
            key=None if drop is None else dropout_key,
            attention=candidate_attention(
                len(text.prefix) + history.shape[1], 1 + train.negatives, text.span, train.layouts
            ),
        )
        nats = jax.nn.logsumexp(scores, axis=1) - scores[:, 0]
        following = following_items(rows, cut - items_first)
        read = hidden[:, len(text.prefix) : len(text.prefix) + history.shape[1]]
        real = following >= 0
        share = real / jnp.maximum(real.sum(axis=1, keepdims=True), 1)
        items = weights.output_rows[jnp.asarray(text.own)]
        next_item = softmax_nats(read, items, jnp.maximum(following, 0), share, groups=train.devices)
        return nats.sum() + next_item, jnp.float32(batch)

    return loss
