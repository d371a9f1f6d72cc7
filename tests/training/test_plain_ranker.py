# SPDX-License-Identifier: Apache-2.0
"""Prompts in plain order as a ranker is trained on them: token for token the server's, with its scores."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.evaluation import validation
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import CAUSAL
from jgr.prompt.segments import Content, arrange
from jgr.prompt.tokens import PromptBuilder
from jgr.serving.api import RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.training import plain_ranker, ranker
from jgr.training.generator import decoder_config
from jgr.training.plain_ranker import PlainText
from jgr.training.ranker_training import train_ranker
from tests.training.test_ranker import KEY, config, padded

Int32 = npt.NDArray[np.int32]
HISTORIES = [np.array(x, np.int32) for x in ([3], [1, 4, 9], [7, 2, 8, 5, 0, 6])]
LISTED = np.array([[1, 2, 10, 12], [11, 5, 2, 0], [9, 23, 1, 4]], np.int32)


@functools.cache
def ring() -> Dataset:
    """24 items on a ring, with symbols in place of words; every user walks it."""
    names = [f"item{i}" for i in range(24)]
    words = [" ".join(f"<a_{(i * at) % 24}>" for at in range(2, 3 + i % 3)) for i in range(24)]
    catalog = Catalog.build(names, [[f"<a_{i}>"] for i in range(24)], [{"title": x} for x in words])
    walks = [[(start + step) % 24 for step in range(9)] for start in range(24)]
    return Dataset(catalog, leave_one_out(walks))


def plain(folder: Path, *more: str) -> Config:
    return config(
        folder,
        "train.layouts=causal",
        "prompt.item={title}{sid}",
        "rank.item={title}{sid}",
        "rank.tokens=64",
        "rank.context=64",
        "train.negatives=3",
        "cache.policy=blocks",
        "cache.repair_tokens=4",
        "profiles.tokens=32",
        *more,
    )


def text_of(cfg: Config) -> PlainText:
    catalog = ring().catalog
    return plain_ranker.prompt_text(cfg, ranker.ranker_tokenizer(cfg, catalog), catalog)


def laying_out(text: PlainText) -> Callable[..., Any]:
    """Compiled: step by step, each of its operations would be a program of its own."""
    return jax.jit(functools.partial(plain_ranker.lay_out, text))


def test_what_is_trained_on_is_what_the_server_would_build(tmp_path: Path) -> None:
    cfg, catalog = plain(tmp_path), ring().catalog
    tokenizer = ranker.ranker_tokenizer(cfg, catalog)
    prompts = PromptBuilder(cfg.prompt, tokenizer, catalog)
    segments = SegmentPrompts(cfg.rank, tokenizer, catalog)
    made = laying_out(text_of(cfg))(padded(HISTORIES, 6), jnp.asarray(LISTED))
    for at, (history, listed) in enumerate(zip(HISTORIES, LISTED, strict=True)):
        prompt = segments.prompt(Content.of(prompts.user(history)), listed, int(history[-1]))
        arranged = arrange(prompt, CAUSAL)
        wanted = np.concatenate([segment.tokens for segment in arranged])
        assert [segment.offset for segment in arranged] == [
            0,
            *np.cumsum([len(segment) for segment in arranged])[:-1],
        ]
        assert int(made.lengths[at]) == len(wanted)
        assert made.tokens[at, : len(wanted)].tolist() == wanted.tolist()
        ends = [len(prompts.user(history[: i + 1])) - 1 for i in range(len(history))]
        assert made.ends[at].tolist() == ends + [-1] * (6 - len(history))


def test_a_prompt_that_is_too_long_loses_the_first_of_its_history(tmp_path: Path) -> None:
    cfg = plain(tmp_path, "rank.tokens=26")
    history, listed = padded(HISTORIES, 6), jnp.asarray(LISTED)
    short_of, whole_of = (laying_out(text_of(of)) for of in (cfg, plain(tmp_path)))
    short, whole = short_of(history, listed), whole_of(history, listed)
    assert short.tokens.shape[1] == 26 and (short.lengths <= 26).all() and (whole.lengths > 26).any()
    for at, rows in enumerate(HISTORIES):
        left = int((np.asarray(short.ends[at]) >= 0).sum())
        assert left >= 1, "the last item is always there"
        fewer = whole_of(padded([rows[-left:]], 6), LISTED[at : at + 1])
        length = int(short.lengths[at])
        assert int(fewer.lengths[0]) == length
        assert short.tokens[at, :length].tolist() == fewer.tokens[0, :length].tolist()


def test_the_loss_is_that_of_the_target_and_of_every_next_item(tmp_path: Path) -> None:
    cfg = plain(tmp_path, "train.dropout=0", "train.layers=1")
    text, train = text_of(cfg), cfg.train
    model = decoder_config(train, 400, 80)
    weights = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(model), KEY))
    log_weights = ranker.negative_weights(cfg, ring())
    window = [5, 9, 2, 7]
    rows = jnp.array([[*window, -1, -1, -1]], jnp.int32)
    cut_key, candidates_key, order_key, _ = jax.random.split(KEY, 4)
    cut = int(ranker.cuts(cut_key, rows)[0])
    history = padded([np.array(window[:cut])], 6)
    drawn = ranker.draw_candidates(candidates_key, log_weights(history), history, jnp.array([window[cut]]), 3)
    order = np.argsort(np.asarray(jax.random.uniform(order_key, (1, 4)))[0])
    listed = np.asarray(drawn)[:, order]
    made = laying_out(text)(history, jnp.asarray(listed))
    prefill = jax.jit(functools.partial(decoder.prefill, attention="reference"), static_argnums=1)
    hidden = np.asarray(prefill(weights, model, made.tokens, made.lengths).hidden[0])
    logits = (hidden @ np.asarray(weights.output_rows)[text.own].T).astype(np.float64)
    last = logits[int(made.lengths[0]) - 1, listed[0]]
    wanted = np.log(np.exp(last).sum()) - last[listed[0].tolist().index(window[cut])]
    next_item = [
        np.log(np.exp(logits[end]).sum()) - logits[end, window[i + 1]]
        for i, end in enumerate(made.ends[0, :cut].tolist())
    ]
    nats, count = jax.jit(plain_ranker.ranking_loss(model, text, log_weights, train))(weights, rows, KEY)
    assert count == 1 and cut >= 1
    np.testing.assert_allclose(nats, wanted + np.mean(next_item), rtol=1e-5)


def test_it_learns_the_rule_and_its_scores_are_the_served_ones(tmp_path: Path) -> None:
    cfg = plain(tmp_path / "ranker", "train.steps=60", "train.evaluate_every=60", "train.dropout=0")
    dataset = ring()
    train_ranker(cfg, dataset, validate=validation.ranker_recall(cfg, dataset))
    model, weights = checkpoint.load(tmp_path / "ranker")
    assert isinstance(model, DecoderConfig) and isinstance(weights, DecoderParams)
    run = jax.jit(
        lambda weights, *rows: plain_ranker.candidate_scores(weights, model, text_of(cfg), *rows)[0]
    )
    trained = run(weights, padded(HISTORIES, 6), LISTED)
    following = np.array(
        [[history[-1] + 1, *listed[1:]] for history, listed in zip(HISTORIES, LISTED, strict=True)]
    )
    best = np.argmax(run(weights, padded(HISTORIES, 6), following.astype(np.int32)), axis=1)
    assert best.tolist() == [0, 0, 0], "the next on the ring, which is the rule"

    async def ask() -> list[list[float]]:
        engine = load_engine(cfg, kinds=["rank"])
        await engine.start()
        names, found = engine.catalog.item_ids, []
        for history, listed in zip(HISTORIES * 2, [*LISTED, *LISTED], strict=True):
            request = RankRequest(
                history=[names[row] for row in history],
                candidates=[names[row] for row in listed],
                layout="causal",
            )
            answer = await engine.answer(request)
            by_id = {item.item_id: item.score for item in answer.items}
            found.append([by_id[names[row]] for row in listed])
        await engine.drain(10)
        return found

    np.testing.assert_allclose(asyncio.run(ask()), np.tile(trained, (2, 1)), atol=1e-4)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    for setting, words in (
        ("rank.method=item_probe", r"rank\.method must be item_token"),
        ("prompt.separator=<sid>", r"takes no prompt\.separator"),
        ("prompt.item={sid}{review}", r"no \{review\} in prompt\.item"),
        ("rank.tokens=16", r"rank\.tokens: a prompt of one item"),
        ("prompt.template={history}", r"prompt\.template must have something before"),
    ):
        with pytest.raises(ConfigError, match=words):
            train_ranker(plain(tmp_path / "ranker", setting), ring())
