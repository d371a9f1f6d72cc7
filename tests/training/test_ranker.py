# SPDX-License-Identifier: Apache-2.0
"""A ranker's prompts and scores in training against those that are served, its loss, and what it learns."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError, UserError, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.data.preparation.prepare import train_title_tokenizer
from jgr.evaluation import validation
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.layouts import ITEM_PREFIX, USER_PREFIX
from jgr.prompt.segments import Content, arrange
from jgr.prompt.tokens import PromptBuilder, Tokenizer
from jgr.serving.api import RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.training import ranker
from jgr.training.candidate_attention import candidate_attention
from jgr.training.generator import decoder_config
from jgr.training.ranker import Text
from jgr.training.ranker_training import train_ranker
from jgr.training.retriever import train_retriever

KEY = jax.random.key(0)
EVERY, STEPS = 60, 60
Int32 = npt.NDArray[np.int32]


@functools.cache
def ring() -> Dataset:
    """24 items on a ring, each a token of its own; every user walks it, so the next item is the next on the ring."""
    names = [f"item{i}" for i in range(24)]
    catalog = Catalog.build(names, [[f"<a_{i}>"] for i in range(24)], [{} for _ in names])
    return Dataset(
        catalog, leave_one_out([[(start + step) % 24 for step in range(9)] for start in range(24)])
    )


def config(folder: Path, *more: str) -> Config:
    return override(
        Config(), "train.model=ranker", f"train.out={folder}", f"model.path={folder}", "model.compilation_cache=",
        "prompt.max_items=6", "rank.method=item_token", "rank.item=<bos><sid>{sid}", "rank.item_span=4",
        "rank.instruction=<sid>{last}", "rank.requests=2", "rank.tokens=96", "rank.context=96", "rank.candidates=32",
        "cache.policy=hotness", "cache.device_mb=1", "beam.width=4", "profiles.batch=1", "profiles.tokens=16",
        "profiles.widths=4", "train.negatives=9", "train.max_items=6", "train.batch=12", f"train.steps={STEPS}",
        "train.learning_rate=1e-2", "train.warmup_steps=5", "train.hidden=32", "train.layers=2", "train.mlp=32",
        f"train.evaluate_every={EVERY}", "train.validation_examples=24", *more,
    )  # fmt: skip


def text_of(cfg: Config) -> Text:
    return ranker.prompt_text(cfg, ranker.ranker_tokenizer(cfg, ring().catalog), ring().catalog)


def padded(sequences: list[Int32], width: int) -> jax.Array:
    rows = [np.pad(x, (0, width - len(x)), constant_values=-1) for x in sequences]
    return jnp.asarray(np.array(rows, np.int32))


@pytest.mark.parametrize("instruction", ["<sid><bos>", "<sid>{last}", "{last}<bos>"])
def test_what_is_trained_on_is_what_the_server_would_build(tmp_path: Path, instruction: str) -> None:
    """As sets of tokens: in which column of the row one stands means nothing."""
    cfg, catalog = config(tmp_path, f"rank.instruction={instruction}"), ring().catalog
    tokenizer = ranker.ranker_tokenizer(cfg, catalog)
    prompts, segments = (
        PromptBuilder(cfg.prompt, tokenizer, catalog),
        SegmentPrompts(cfg.rank, tokenizer, catalog),
    )
    history, candidates = np.array([3, 1, 4], np.int32), np.array([7, 2, 9, 5], np.int32)
    lay_out = jax.jit(functools.partial(ranker.lay_out, text_of(cfg)))
    for layout in (USER_PREFIX, ITEM_PREFIX):
        wanted = {
            (token, segment.number, int(segment.kind), segment.offset + i, int(layout.bits[segment.kind]))
            for segment in arrange(
                segments.prompt(Content.of(prompts.user(history)), candidates, int(history[-1])), layout
            )
            for i, token in enumerate(segment.tokens.tolist())
        }
        rows, listed = padded([history], 5), padded([candidates], 4)
        tokens, described, sees = lay_out(rows, listed, jnp.array([layout == ITEM_PREFIX]))
        columns = (tokens, described.segment, described.kind, described.position, sees)
        real = np.asarray(described.request)[0] >= 0
        found = list(zip(*(np.asarray(x)[0][real].tolist() for x in columns), strict=True))
        assert set(found) == wanted and len(found) == len(wanted)


def scored(
    weights: DecoderParams,
    model: DecoderConfig,
    text: Text,
    histories: jax.Array,
    listed: Any,
    items_first: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """As training computes them."""

    @jax.jit
    def run(weights: DecoderParams, *arrays: jax.Array) -> Any:
        return ranker.candidate_scores(weights, model, text, *arrays, attention="reference")

    scores, hidden = run(weights, histories, listed, items_first)
    return scores, hidden


def test_a_candidate_is_the_begin_of_its_title_and_its_own_token(tmp_path: Path) -> None:
    titles = ["Red shoes for running", "Red shoes", "Blue"]
    catalog = Catalog.build("abc", [[f"<a_{i}>"] for i in range(3)], [{"title": title} for title in titles])
    lines = [json.dumps({"item_id": x, "metadata": {"title": y}}) for x, y in zip("abc", titles, strict=True)]
    (tmp_path / "items.jsonl").write_text("\n".join(lines) + "\n")
    train_title_tokenizer(tmp_path / "items.jsonl", 300, tmp_path / "title_tokenizer.json")
    cfg = config(
        tmp_path, "data.kind=prepared", f"data.path={tmp_path}", "rank.item={title}{sid}", "rank.item_span=5"
    )
    tokenizer, alone = (
        ranker.ranker_tokenizer(cfg, catalog),
        Tokenizer.from_file(tmp_path / "title_tokenizer.json"),
    )
    text = ranker.prompt_text(cfg, tokenizer, catalog)
    assert text.own.tolist() == [alone.vocab_size + i for i in range(3)]
    for row, title in enumerate(titles):
        wanted = [*alone.encode(title)[:4], alone.vocab_size + row]
        assert text.items[row, : text.lengths[row]].tolist() == wanted
    assert text.lengths.max() == 5 and tokenizer.token_id("<bos>") == alone.token_id("<bos>")


class Served:
    """Scores of candidates, in the order asked for, by an engine."""

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._ids = cfg, ring().catalog.item_ids

    async def scores(self, histories: list[Int32], listed: Int32) -> dict[str, list[list[float]]]:
        engine = load_engine(self._cfg, kinds=["rank"])
        await engine.start()
        found: dict[str, list[list[float]]] = {"user_prefix": [], "item_prefix": []}
        for layout, scores in found.items():
            for history, candidates in zip(histories, listed, strict=True):
                fields: dict[str, Any] = {
                    "history": self._names(history),
                    "candidates": self._names(candidates),
                    "layout": layout,
                }
                answer = await engine.answer(RankRequest(**fields))
                by_id = {item.item_id: item.score for item in answer.items}
                scores.append([by_id[name] for name in self._names(candidates)])
        await engine.drain(10)
        return found

    def _names(self, rows: Int32) -> list[str]:
        return [self._ids[row] for row in rows]


@pytest.mark.slow
def test_it_learns_the_rule_and_its_scores_are_the_served_ones(tmp_path: Path) -> None:
    cfg, dataset = config(tmp_path / "ranker"), ring()
    train_ranker(cfg, dataset, validate=validation.ranker_recall(cfg, dataset))
    lines = [json.loads(x) for x in (tmp_path / "ranker" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 4
    assert lines[-1]["recall@10"] == 1  # of all items but the history's, the mean of both layouts

    text = text_of(cfg)
    model, weights = checkpoint.load(tmp_path / "ranker")
    assert isinstance(model, DecoderConfig) and isinstance(weights, DecoderParams)
    rng, n = np.random.default_rng(0), dataset.catalog.n_items
    histories = [rng.integers(0, n, size).astype(np.int32) for size in (1, 4, 6, 3)]
    listed = np.array([rng.choice(n, 8, replace=False) for _ in histories], np.int32)
    # Each twice, the second time from the cache.
    served = asyncio.run(Served(cfg).scores(histories * 2, np.tile(listed, (2, 1))))
    for layout, found in served.items():
        first = jnp.full(4, layout == "item_prefix")
        scores, _ = scored(weights, model, text, padded(histories, 6), listed, first)
        np.testing.assert_allclose(found, np.tile(scores, (2, 1)), atol=1e-4)


def test_the_loss_is_that_of_the_target_among_the_candidates_and_of_every_next_item(tmp_path: Path) -> None:
    cfg = config(tmp_path, "train.dropout=0", "train.layouts=item_prefix", "train.layers=1")
    text, train = text_of(cfg), cfg.train
    model = decoder_config(train, 400, 32)
    weights = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(model), KEY))
    log_weights = ranker.negative_weights(cfg, ring())
    window = [5, 9, 2, 7]
    rows = jnp.array([[*window, -1, -1, -1]], jnp.int32)
    keys = jax.random.split(KEY, 4)
    cut = int(1 + np.sqrt(float(jax.random.uniform(keys[0], (1,))[0])) * 3)
    history = padded([np.array(window[:cut])], 6)
    listed = jax.jit(ranker.draw_candidates, static_argnums=4)(
        keys[1], log_weights(history), history, jnp.array([window[cut]]), 9
    )
    assert listed[0, 0] == window[cut] and len(set(listed[0].tolist()) | set(window[:cut])) == 10 + cut
    scores, hidden = scored(weights, model, text, history, listed, jnp.array([True]))
    wanted = float(np.log(np.exp(scores).sum()) - scores[0, 0])
    logits = np.asarray(hidden[0, 1 : 1 + cut] @ weights.embed[text.own].T, np.float64)
    following = [np.log(np.exp(logits[i]).sum()) - logits[i, window[i + 1]] for i in range(cut - 1)]
    loss = jax.jit(ranker.ranking_loss(model, text, log_weights, train))
    nats, targets = loss(weights, rows, KEY)
    # All that is random comes from the key, so a training that goes on is the unbroken one.
    assert loss(weights, rows, KEY)[0] == nats != loss(weights, rows, keys[0])[0]
    assert targets == 1 and cut > 1
    np.testing.assert_allclose(nats, wanted + np.mean(following), rtol=1e-5)


def test_the_pairs_that_are_left_out_are_those_that_nothing_sees(tmp_path: Path) -> None:
    """Values and gradients, in both layouts, with short histories, short candidates and candidates left out."""
    cfg = config(tmp_path, "train.kv_heads=2", "train.heads=4", "rank.item_span=5")
    text = text_of(cfg)
    model = decoder_config(cfg.train, 400, 32)
    weights = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(model), KEY))
    histories = padded([np.array(x, np.int32) for x in ([3], [1, 4, 9], [7, 2, 8, 5, 0, 6])], 6)
    listed = jnp.array([[1, 2, 10, -1], [11, 5, 2, 0], [9, 23, 1, -1]])

    @functools.partial(jax.jit, static_argnames="layouts")
    def run(weights: DecoderParams, first: jax.Array, layouts: str = "") -> Any:
        """Without layouts every pair is computed."""
        form = candidate_attention(len(text.prefix) + 6, 4, text.span, layouts) if layouts else "reference"

        def total(weights: DecoderParams) -> Any:
            scores, hidden = ranker.candidate_scores(
                weights, model, text, histories, listed, first, attention=form
            )
            real = histories >= 0
            read = jnp.where(real[..., None], hidden[:, len(text.prefix) : len(text.prefix) + 6], 0)
            return (jnp.where(listed >= 0, jnp.tanh(scores), 0)).sum() + (read**3).sum(), (scores, read)

        return jax.value_and_grad(total, has_aux=True)(weights)

    for layouts, items_first in (("both", [1, 0, 1]), ("item_prefix", [1, 1, 1]), ("user_prefix", [0, 0, 0])):
        first = jnp.array(items_first, bool)
        (_, wanted), wanted_gradients = run(weights, first)
        (_, found), gradients = run(weights, first, layouts)
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-4, err_msg=layouts)
        np.testing.assert_allclose(found[1], wanted[1], atol=1e-4, err_msg=layouts)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * float(abs(y).max() + 1)),
            gradients,
            wanted_gradients,
        )


def test_negatives_are_drawn_by_weight_without_repetition() -> None:
    weights = jnp.log(jnp.array([0.6, 0.2, 0.1, 0.05, 0.05]))
    history, target = jnp.full((4000, 2), -1).at[:, 0].set(4), jnp.full(4000, 3)
    draw = jax.jit(ranker.draw_candidates, static_argnums=4)
    drawn = np.asarray(draw(KEY, weights, history, target, 2))
    assert (drawn[:, 0] == 3).all() and (drawn[:, 1] != drawn[:, 2]).all() and not (drawn == 4).any()
    both = 0.6 / 0.9 * (0.2 / 0.3) + 0.2 / 0.9 * (0.6 / 0.7)  # items 0 and 1, in either order
    assert abs(np.mean(np.sort(drawn[:, 1:], axis=1) == [0, 1], axis=0)[1] - both) < 0.03
    few = np.asarray(draw(KEY, jnp.zeros(5), jnp.array([[0, 1, 2]]), jnp.array([3]), 3))
    assert few.tolist() == [[3, 4, -1, -1]]  # the others are of the history


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    for setting, words in (
        ("train.negatives=0", r"train\.negatives must be 1 to"),
        ("rank.method=item_probe", r"rank\.method must be item_token"),
        ("prompt.item={sid}{sid}", r"prompt\.item=\{sid\}"),
        ("prompt.template={history}", r"prompt\.template must have something before"),
        ("train.out=", r"train\.out: the folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            train_ranker(config(tmp_path / "ranker", setting), ring())


def test_a_prompt_with_words_behind_the_history_is_served_too(tmp_path: Path) -> None:
    more = ("prompt.template=<bos>{history}<sid><sid>", "train.steps=1", "train.evaluate_every=0")
    cfg = config(tmp_path / "ranker", *more)
    train_ranker(cfg, ring())
    model = load_engine(cfg).info
    assert model.max_history_in_prompt == 6


def test_a_retriever_that_has_learnt_the_targets_does_not_validate(tmp_path: Path) -> None:
    sasrec = ("train.model=sasrec", "train.steps=1", "train.evaluate_every=0", "train.learn_valid=true")
    train_retriever(config(tmp_path / "retriever", *sasrec), ring())
    cfg = config(tmp_path / "ranker", f"train.retriever={tmp_path / 'retriever'}")
    with pytest.raises(UserError, match=r"train\.retriever: .*retriever has learnt the validation targets"):
        validation.ranker_recall(cfg, ring())


def test_a_run_does_not_go_on_with_a_retriever_that_was_trained_anew(tmp_path: Path) -> None:
    """In the same folder: half of its negatives would be another retriever's."""

    def retrieve(seed: int) -> None:
        out = f"train.out={tmp_path / 'retriever'}"
        train_retriever(config(tmp_path, out, *short, "train.model=sasrec", f"train.seed={seed}"), ring())
        shutil.rmtree(tmp_path / "retriever.training")

    short = ("train.steps=1", "train.evaluate_every=0")
    retrieve(0)
    cfg = config(tmp_path / "ranker", *short, f"train.retriever={tmp_path / 'retriever'}")
    train_ranker(cfg, ring())
    train_ranker(override(cfg, "train.steps=2"), ring())
    retrieve(1)
    with pytest.raises(ConfigError, match=r"holds a run of other settings or data \(retriever was "):
        train_ranker(override(cfg, "train.steps=3"), ring())
