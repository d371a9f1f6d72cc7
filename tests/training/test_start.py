# SPDX-License-Identifier: Apache-2.0
"""train.start: a ranker that begins as the generator whose folder it names."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, ConfigError, override
from jgr.data.datasets import Dataset
from jgr.data.interactions import leave_one_out
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderParams
from jgr.prompt.tokens import Tokenizer, semantic_id_tokenizer
from jgr.training import ranker
from jgr.training.generator import decoder_config, train_generator
from jgr.training.ranker_training import train_ranker
from jgr.training.start import begin_from
from tests.models.test_lazy_decoder import PLAIN, draw
from tests.training.shortcuts import equal_steps_compiled_once

SIZES = (
    "train.hidden=16", "train.layers=2", "train.mlp=16", "train.heads=2", "train.kv_heads=1", "train.head_dim=8",
    "train.max_items=5", "train.batch=8", "train.warmup_steps=1",
)  # fmt: skip


def dataset(n_items: int = 12) -> Dataset:
    names = [f"item{i}" for i in range(n_items)]
    catalog = Catalog.build(names, [[f"<a_{i}>"] for i in range(n_items)], [{} for _ in names])
    return Dataset(catalog, leave_one_out([[(u + i) % n_items for i in range(7)] for u in range(n_items)]))


def config(out: Path, *more: str) -> Config:
    return override(
        Config(), f"train.out={out}", "prompt.max_items=5", "rank.method=item_token", "rank.item=<sid>{sid}",
        "rank.instruction=<sid>", "rank.item_span=3", *SIZES, *more,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cheap_trainings() -> Iterator[None]:
    with equal_steps_compiled_once():
        yield


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("start") / "items"
    return train_generator(config(out, "train.steps=3"), dataset())


def ranker_config(out: Path, *more: str) -> Config:
    return config(out, "train.model=ranker", "train.negatives=3", "train.steps=1", *more)


@pytest.mark.parametrize("shift", [0, 5])
def test_a_ranker_begins_as_the_generator_item_by_item(generator: Path, shift: int) -> None:
    """Another catalog, which has an item the generator never saw and its known ones under other token ids; shifted, by
    names that were other items'."""
    numbers = (14, 3, 0, 11, 7)
    names = [f"<a_{i + shift}>" for i in numbers]
    catalog = Catalog.build([f"item{i}" for i in numbers], [[name] for name in names], [{} for _ in names])
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = ranker_config(Path("unused"))
    model = decoder_config(cfg.train, tokenizer.vocab_size, 64)
    drawn = params.initialize(decoder.spec(model), jax.random.key(3))
    begun = begin_from(replace(cfg.train, start=str(generator)), model, tokenizer, catalog)(drawn)
    _, weights = checkpoint.load(generator)
    assert isinstance(weights, DecoderParams)
    jax.tree.map(np.testing.assert_array_equal, begun.layers, weights.layers)
    np.testing.assert_array_equal(begun.norm, weights.norm)
    its = Tokenizer.from_file(generator / "tokenizer.json")
    called = dict(zip(names, [f"<a_{i}>" for i in numbers], strict=True))
    kept = [
        known for name in tokenizer.vocabulary if (known := its.token_id(called.get(name, name))) is not None
    ]
    new = drawn.embed * np.sqrt((weights.embed[np.array(kept)] ** 2).mean() / (drawn.embed**2).mean())
    for name, token in tokenizer.vocabulary.items():
        known = its.token_id(called.get(name, name))
        row = new[token] if known is None else weights.embed[known]
        np.testing.assert_allclose(begun.embed[token], row, rtol=1e-6, err_msg=name)
    assert its.token_id("<a_14>") is None and its.token_id("<a_3>") != tokenizer.token_id(names[1])

    # So the user's part of a prompt, items behind it, says of the next item what the generator does.
    text = ranker.prompt_text(cfg, tokenizer, catalog)
    history = jnp.array([[4, 1, 2]], jnp.int32)
    scored = jax.jit(
        functools.partial(ranker.candidate_scores, model=model, text=text, attention="reference")
    )
    _, hidden = scored(begun, history=history, candidates=jnp.array([[3, 0]]), items_first=jnp.array([False]))
    old = [its.token_id(name) for name in ("<bos>", *(called[names[row]] for row in (4, 1, 2)))]
    prefill = jax.jit(functools.partial(decoder.prefill, attention="reference"), static_argnums=1)
    wanted = prefill(weights, model, jnp.array([old], jnp.int32), jnp.array([4])).hidden
    np.testing.assert_allclose(hidden[0, :4], wanted[0], atol=1e-5)


def test_training_goes_on_from_it(generator: Path, tmp_path: Path) -> None:
    cfg = ranker_config(tmp_path / "ranker", f"train.start={generator}", "train.learning_rate=0")
    _, weights = checkpoint.load(train_ranker(cfg, dataset()))
    jax.tree.map(np.testing.assert_array_equal, weights, checkpoint.load(generator)[1])


def test_a_model_of_more_layers_has_new_ones_above(generator: Path, tmp_path: Path) -> None:
    train = ranker_config(tmp_path / "a", f"train.start={generator}", "train.layers=3").train
    tokenizer, catalog = Tokenizer.from_file(generator / "tokenizer.json"), dataset().catalog
    model = decoder_config(train, tokenizer.vocab_size, 64)
    drawn = params.initialize(decoder.spec(model), jax.random.key(3))
    begun = begin_from(train, model, tokenizer, catalog)(drawn)
    _, weights = checkpoint.load(generator)
    assert isinstance(weights, DecoderParams)
    wanted = jax.tree.map(lambda known, new: np.concatenate([known, new[2:]]), weights.layers, drawn.layers)
    new = begun.layers
    half = train.head_dim  # of two query heads to one of keys and values
    for at in (0, 1):
        np.testing.assert_allclose(2 * new.wo[2, half * at : half * (at + 1)], new.wv[2].T, rtol=1e-6)
    np.testing.assert_array_equal(new.wk[2], new.wq[2, :, :half])
    for name in ("wk", "wo"):
        np.testing.assert_array_equal(getattr(new, name)[:2], getattr(weights.layers, name))
    rest = replace(new, wk=wanted.wk, wo=wanted.wo)
    jax.tree.map(np.testing.assert_array_equal, rest, wanted)
    fewer = replace(train, start=str(tmp_path / "three"), layers=2)
    checkpoint.save(
        tmp_path / "three", model, drawn, lambda folder: tokenizer.save(folder / "tokenizer.json")
    )
    with pytest.raises(ConfigError, match=r"train\.start: .* is of other sizes: .*layers=3.* not .*layers=2"):
        begin_from(fewer, decoder_config(fewer, tokenizer.vocab_size, 64), tokenizer, catalog)


def test_without_a_catalog_tokens_are_matched_by_name(generator: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(generator, tmp_path / "elsewhere")
    (folder / "catalog.jsonl").unlink()
    cfg = ranker_config(tmp_path / "ranker", f"train.start={folder}", "train.learning_rate=0")
    _, weights = checkpoint.load(train_ranker(cfg, dataset()))
    jax.tree.map(np.testing.assert_array_equal, weights, checkpoint.load(generator)[1])


def test_a_catalog_of_token_numbers(generator: Path, tmp_path: Path) -> None:
    """Numbers are rows as they are, in either catalog, whatever tokens are called."""
    folder = shutil.copytree(generator, tmp_path / "numbered")
    own = dataset().catalog
    tokenizer = Tokenizer.from_file(generator / "tokenizer.json")
    wanted = [tokenizer.vocabulary[f"<a_{i}>"] for i in (5, 2)]
    numbered = Catalog.build(["item0", "item1"], [[number] for number in wanted], [{}, {}])
    save_catalog(numbered, folder / "catalog.jsonl")
    model = decoder_config(config(tmp_path).train, tokenizer.vocab_size, 32)
    drawn = params.initialize(decoder.spec(model), jax.random.key(3))
    _, weights = checkpoint.load(generator)
    assert isinstance(weights, DecoderParams)
    train = replace(ranker_config(tmp_path / "a").train, start=str(folder))
    begun = begin_from(train, model, tokenizer, own)(drawn)
    ours = [tokenizer.vocabulary[f"<a_{i}>"] for i in range(12)]
    np.testing.assert_array_equal(begun.embed[jnp.array(ours[:2])], weights.embed[jnp.array(wanted)])
    new, old = begun.embed[jnp.array(ours[2:])], drawn.embed[jnp.array(ours[2:])]
    np.testing.assert_allclose(new / old, np.full(new.shape, new[0, 0] / old[0, 0]), rtol=1e-5)
    same = begin_from(train, model, tokenizer, numbered)(drawn)
    np.testing.assert_array_equal(same.embed[jnp.array(wanted)], weights.embed[jnp.array(wanted)])


def test_a_generator_begins_from_a_generator(generator: Path, tmp_path: Path) -> None:
    out = train_generator(config(tmp_path / "more", "train.steps=1", f"train.start={generator}"), dataset(14))
    found, weights = checkpoint.load(out)
    _, before = checkpoint.load(generator)
    assert isinstance(weights, DecoderParams) and isinstance(before, DecoderParams)
    assert found.vocab_size == 17
    np.testing.assert_allclose(weights.embed[:15], before.embed, atol=3e-3)


def test_what_cannot_be_begun_from_is_named(generator: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train\.start: .* is of other sizes: .*hidden=16.* not .*hidden=32"
    ):
        cfg = ranker_config(tmp_path / "a", f"train.start={generator}", "train.hidden=32")
        train_ranker(cfg, dataset())
    with pytest.raises(ConfigError, match=r"train\.start: .*no such model folder"):
        train_ranker(ranker_config(tmp_path / "a", f"train.start={tmp_path}/none"), dataset())
    with pytest.raises(ConfigError, match=r"train\.start: a decoder cannot begin train\.model=sasrec"):
        config(tmp_path, "train.model=sasrec", "train.start=somewhere")

    def write_beside(folder: Path) -> None:
        save_catalog(dataset().catalog, folder / "catalog.jsonl")
        semantic_id_tokenizer(dataset().catalog).save(folder / "tokenizer.json")

    lazy = tmp_path / "lazy"
    checkpoint.save(lazy, PLAIN, draw(PLAIN), write_beside)
    with pytest.raises(ConfigError, match=r"train\.start: .* is not a decoder"):
        train_ranker(ranker_config(tmp_path / "a", f"train.start={lazy}"), dataset())
    unknown = Catalog.build("ab", [["<x>"], ["<y>"]], [{}, {}])
    wordless = Tokenizer.from_file(generator / "tokenizer.json")
    train = replace(ranker_config(tmp_path / "a").train, start=str(generator))
    model = decoder_config(train, wordless.vocab_size, 32)
    inner = semantic_id_tokenizer(unknown)
    with pytest.raises(ConfigError, match=r"train\.start: .*none of this dataset's items is in its catalog"):
        begin_from(train, model, inner, unknown)
    nameless = shutil.copytree(generator, tmp_path / "nameless")
    save_catalog(Catalog.build(["item1"], [["<b>"]], [{}]), nameless / "catalog.jsonl")
    with pytest.raises(
        ConfigError, match=r"train\.start: .*'<b>' of the catalog.jsonl is not in the tokenizer"
    ):
        begin_from(replace(train, start=str(nameless)), model, wordless, dataset().catalog)
    (nameless / "catalog.jsonl").unlink()
    inner.vocabulary = {"<x>": 0}
    with pytest.raises(ConfigError, match=r"train\.start: .* has no token of this dataset's"):
        begin_from(replace(train, start=str(nameless)), model, inner, unknown)
    with pytest.raises(ConfigError, match=r"train\.start: .*: File name too long"):
        begin_from(replace(train, start="x" * 1000), model, wordless, unknown)
    merged = Catalog.build(["item1", "item2"], [["<a_0>"], ["<a_0>"]], [{}, {}])
    with pytest.raises(
        ConfigError, match=r"train\.start: .*others: '<a_0>' stands for its '<a_.>' and '<a_.>'"
    ):
        begin_from(train, model, wordless, merged)
    deep = Catalog.build("ab", [["<x>", "<p>"], ["<x>", "<q>"]], [{}, {}])
    with pytest.raises(
        ConfigError, match=r"train\.start: .*: its semantic ids have 1 symbols, this dataset's 2"
    ):
        begin_from(train, model, wordless, deep)
    for out in (generator, generator.parent):
        with pytest.raises(ConfigError, match=r"train\.start: .* is train\.out too"):
            begin_from(replace(train, out=str(out)), model, wordless, dataset().catalog)
    more = shutil.copytree(generator, tmp_path / "more")
    (more / "digests.json").unlink()  # which would name the changed file
    wordless.with_tokens(["<more>"]).save(more / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"train\.start: .* tokens that its weights have no row for"):
        train_ranker(ranker_config(tmp_path / "a", f"train.start={more}"), dataset())
    (more / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"train\.start: .*tokenizer\.json"):
        train_ranker(ranker_config(tmp_path / "a", f"train.start={more}"), dataset())
    assert not (tmp_path / "a").exists()
