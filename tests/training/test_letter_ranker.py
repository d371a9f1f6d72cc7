# SPDX-License-Identifier: Apache-2.0
"""Rankers that answer by letters: the server's prompts and scores, the loss by hand, and a task that needs context."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import Config, ConfigError, override
from jgr.data.interactions import Ragged
from jgr.evaluation import validation
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import CAUSAL, Kind
from jgr.prompt.segments import Content, arrange, of_kind
from jgr.prompt.tokens import PromptBuilder
from jgr.serving.api import RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.training import letter_ranker, plain_ranker, ranker
from jgr.training.generator import decoder_config
from jgr.training.letter_ranker import LetterText, Targets
from jgr.training.ranker_training import train_ranker
from jgr.training.retriever import train_retriever
from tests.serving.decoders.dense import Dense
from tests.training.test_plain_ranker import HISTORIES, LISTED, laying_out, plain, ring
from tests.training.test_ranker import padded


def by_letters(folder: Path, *more: str) -> Config:
    return plain(
        folder, "rank.method=list_letter", "rank.item=<sid>{title}{sid}", "rank.item_span=6", "rank.candidates=8",
        "rank.tokens=96", "rank.context=96", "cache.repair_tokens=6", "train.layers=3", "train.hard_negatives=0.8",
        *more,
    )  # fmt: skip


def text_of(cfg: Config) -> LetterText:
    catalog = ring().catalog
    return letter_ranker.prompt_text(cfg, ranker.ranker_tokenizer(cfg, catalog), catalog)


def softmax_nats(scores: np.ndarray, at: int) -> float:
    return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[at])


@pytest.mark.parametrize("label", ["", "<l_{n}>", "<sid><l_{n}>"])
def test_prompts_and_letters_are_the_servers(tmp_path: Path, label: str) -> None:
    cfg, catalog = by_letters(tmp_path, f"rank.label={label}"), ring().catalog
    tokenizer, text = ranker.ranker_tokenizer(cfg, catalog), text_of(cfg)
    prompts, segments = (
        PromptBuilder(cfg.prompt, tokenizer, catalog),
        SegmentPrompts(cfg.rank, tokenizer, catalog),
    )
    made = laying_out(text.plain)(padded(HISTORIES, 6), jnp.asarray(LISTED))
    ends = letter_ranker.candidate_ends(text.plain, made, jnp.asarray(LISTED))
    for at, (history, listed) in enumerate(zip(HISTORIES, LISTED, strict=True)):
        user = Content.of(prompts.user(history))
        prompt = arrange(segments.prompt(user, listed, int(history[-1]), labelled=True), CAUSAL)
        assert sum(segment.kind == Kind.LABEL for segment in prompt) == (len(listed) if label else 0)
        wanted = np.concatenate([segment.tokens for segment in prompt])
        assert made.tokens[at, : int(made.lengths[at])].tolist() == wanted.tolist()
        assert ends[at].tolist() == [
            segment.offset + len(segment) - 1 for segment in of_kind(prompt, Kind.ITEM)
        ]
        assert segments.columns(listed)[0].tolist() == np.asarray(text.letters).tolist()
        assert [tokenizer.token_id(f"<l_{n}>") for n in range(4)] == np.asarray(text.letters).tolist()


@pytest.mark.parametrize(("lookups", "retrieved"), [(0, ()), (1, ()), (0, (9, 7, 1, 3)), (0, (9, 8, 1, 3))])
def test_the_loss_is_its_seven_parts_by_a_dense_decoder(
    tmp_path: Path, lookups: int, retrieved: tuple[int, ...]
) -> None:
    """retrieved: the retriever's candidates, with and without the target."""
    cfg = by_letters(
        tmp_path,
        "train.dropout=0",
        "rank.label=<l_{n}>",
        "rank.instruction=<sid>{last}",
        f"train.lookups={lookups}",
    )
    text, train = text_of(cfg), cfg.train
    model = decoder_config(train, 400, 80)
    key = jax.random.key(5)
    weights = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(model), key))
    log_weights = ranker.negative_weights(cfg, ring())
    window = [5, 9, 2, 7]
    rows = jnp.array([[*window, -1, -1, -1]], jnp.int32)
    candidates_key, order_key, _, _ = jax.random.split(key, 4)
    history = padded([np.array(window[:3])], 6)
    drawn = ranker.draw_candidates(candidates_key, log_weights(history), history, jnp.array([7]), 3)
    listed = np.asarray(drawn)[0, np.argsort(np.asarray(jax.random.uniform(order_key, (1, 4)))[0])]
    if 7 in retrieved:
        listed = np.array(retrieved)
    names_the_target = bool(lookups or (retrieved and 7 not in retrieved))
    best = jnp.zeros(80).at[jnp.array(retrieved, int)].set(jnp.arange(4.0, 4.0 - len(retrieved), -1))
    letters, own = np.asarray(text.letters), np.asarray(text.plain.own)
    made = plain_ranker.lay_out(
        text.plain, history, jnp.asarray(listed[None]), jnp.array([7]) if names_the_target else None
    )
    tokens = np.asarray(made.tokens)[0, : int(made.lengths[0])]
    assert tokens[-1] == own[7 if names_the_target else window[2]]
    position, mask = np.arange(len(tokens)), np.tri(len(tokens), dtype=bool)

    dense = Dense(model, weights)
    states = [dense.embed(tokens)]
    for layer in range(3):
        states.append(dense.step(layer, states[-1], *dense.project(layer, states[-1], position), mask))
    before, last = dense.logits(states[2]), dense.logits(states[3])
    queries, keys, _ = dense.project(2, states[2], position)
    asked = listed.tolist().index(7)
    ends = np.asarray(letter_ranker.candidate_ends(text.plain, made, jnp.asarray(listed[None])))[0]
    group = model.heads // model.kv_heads
    place = float(np.mean([softmax_nats(before[end, letters], n) for n, end in enumerate(ends)]))
    named = last[made.ends[0].max(), own[listed]]
    shares = np.exp(named - named.max()) / np.exp(named - named.max()).sum()
    looks = [
        softmax_nats(keys[ends, head // group] @ queries[-1, head] / np.sqrt(model.head_dim), asked)
        for head in range(model.heads // 2)
    ]
    copy = sum(float(share) * softmax_nats(last[-1, letters], n) for n, share in enumerate(shares))
    known = 1 - place / np.log(4)
    assert 0 < known < 1
    wanted = [
        known * (softmax_nats(last[-1, letters], asked) + (0 if names_the_target else copy)),
        softmax_nats(before[-1, own[listed]], asked),
        float(np.mean(looks)),
        float(
            np.mean([softmax_nats(last[end, own], window[i + 1]) for i, end in enumerate(made.ends[0, :3])])
        ),
        softmax_nats(before[ends, text.plain.prefix[0]], asked),
        place,
    ]
    loss = letter_ranker.letter_loss(
        model, text, log_weights, train, (lambda history: best[None]) if retrieved else None
    )
    nats, count = jax.jit(loss)(weights, rows, key)
    assert count == 1 and min(wanted) > 0
    np.testing.assert_allclose(nats, sum(wanted), rtol=1e-4)


def test_every_item_but_the_first_is_a_target_once_an_epoch() -> None:
    sequences = Ragged.of([[3, 1, 4, 1, 5, 9], [2], [], [6, 5]])
    train = by_letters(Path("x"), "train.batch=3", "train.max_items=3").train
    targets = Targets(sequences, train)
    assert len(targets) == 6 and targets.steps_per_epoch() == 2
    for epoch in range(2):
        rows = np.concatenate([targets.batch(2 * epoch + step) for step in range(2)])
        assert sorted(rows.tolist()) == [
            [1, 4, 1, 5], [3, 1, -1, -1], [3, 1, 4, -1], [3, 1, 4, 1], [4, 1, 5, 9], [6, 5, -1, -1],
        ]  # fmt: skip
    with pytest.raises(ConfigError, match="no user has two interactions"):
        Targets(Ragged.of([[2]]), train)


def test_what_is_trained_is_what_is_served(tmp_path: Path) -> None:
    cfg = by_letters(
        tmp_path / "ranker", "train.steps=12", "train.evaluate_every=12", "train.layers=2", "rank.label=<l_{n}>",
        "train.tied=false",
    )  # fmt: skip
    dataset = ring()
    train_ranker(cfg, dataset, validate=validation.ranker_recall(cfg, dataset))
    lines = [json.loads(line) for line in (tmp_path / "ranker" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "ndcg@10" in line] == [12]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    model, weights = checkpoint.load(tmp_path / "ranker")
    assert isinstance(model, DecoderConfig) and isinstance(weights, DecoderParams)
    text = text_of(cfg)
    scores = jax.jit(lambda weights, *rows: letter_ranker.answers(weights, model, text, *rows).scores)
    trained = np.asarray(scores(weights, padded(HISTORIES, 6), LISTED))
    assert np.ptp(trained) > 0.05, "scores that hardly differ would compare nothing"

    async def ask() -> list[list[float]]:
        engine = load_engine(cfg, kinds=["rank"])
        await engine.start()
        names, found = engine.catalog.item_ids, []
        for history, rows in zip(HISTORIES * 2, [*LISTED, *LISTED], strict=True):
            request = RankRequest(
                history=[names[row] for row in history],
                candidates=[names[row] for row in rows],
            )
            by_id = {item.item_id: item.score for item in (await engine.answer(request)).items}
            found.append([by_id[names[row]] for row in rows])
        await engine.drain(10)
        return found

    np.testing.assert_allclose(asyncio.run(ask()), np.tile(trained, (2, 1)), atol=2e-4)


def test_candidates_are_the_retrievers_if_asked_for(tmp_path: Path) -> None:
    settings = ["train.steps=3", "train.dropout=0", f"train.retriever={tmp_path / 'sasrec'}"]
    short = override(
        by_letters(tmp_path / "sasrec"), "train.model=sasrec", "train.steps=3", "train.layouts=both"
    )
    train_retriever(short, ring())
    losses = []
    for retrieved in ("false", "true"):
        out = tmp_path / retrieved
        train_ranker(by_letters(out, *settings, f"train.retrieved={retrieved}"), ring())
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert len(losses[0]) == len(losses[1]) == 3 and losses[0][0] != losses[1][0]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    for setting, words in (
        ("rank.candidates=3", r"rank\.candidates \(3\) must be at least 1 \+ train\.negatives, 4"),
        ("rank.letters=l", r"rank\.letters: must have \{n\}"),
        ("train.layers=1", r"train\.layers: a ranker that learns letters needs two"),
        ("train.lookups=2", r"train\.lookups must be at most 1, not 2"),
        ("train.retrieved=true", r"train\.retrieved: only with train\.retriever"),
        ("rank.label=<sid>", r"rank\.label: must have \{n\}"),
        ("rank.label=<l_{n}>{title}", r"rank\.label: unknown placeholder \{title\}"),
        ("prompt.separator=<sid>", r"takes no prompt\.separator"),
    ):
        with pytest.raises(ConfigError if "rank.l" not in setting else Exception, match=words):
            train_ranker(by_letters(tmp_path / "ranker", setting), ring())
    for name, value in (("lookups", "0.5"), ("retrieved", "true")):
        plain_order = plain(
            tmp_path / "ranker", f"train.{name}={value}", f"train.retriever={tmp_path / 'retriever'}"
        )
        with pytest.raises(ConfigError, match=rf"train\.{name}: only a ranker that learns letters has it"):
            train_ranker(plain_order, ring())
    nameless = by_letters(tmp_path / "ranker", "train.lookups=0.5", "rank.instruction=<sid>")
    with pytest.raises(ConfigError, match=r"train\.lookups: rank\.instruction must have \{last\}"):
        train_ranker(nameless, ring())
