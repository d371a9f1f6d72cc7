# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as they are published, made small: what jgr convert writes gives the original's logits and is served."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jgr.catalog import CatalogError
from jgr.config import load_config, override
from jgr.data.sid2pid import load_sid2pid
from jgr.models import checkpoint, decoder, hf, params
from jgr.models.decoder import DecoderConfig
from jgr.prompt import PromptBuilder, Tokenizer
from jgr.serving.api import RecommendRequest
from jgr.serving.loading import load_engine

RUN = "import sys; from jgr.cli.main import run; sys.exit(run(['convert', *sys.argv[1:]]))"


def convert(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)


def published(folder: Path, family: str, names: list[str]) -> Path:
    """A Hugging Face folder: bytes as text tokens, the ids' tokens added in shuffled order, a padded vocabulary."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shuffled = names.copy()
    random.Random(7).shuffle(shuffled)
    inner.add_special_tokens(shuffled)
    inner.save(str(folder / "tokenizer.json"))
    cfg = DecoderConfig(
        family=family, vocab_size=len(alphabet) + len(names) + 5, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8,
        mlp=32, rope_theta=1e4, norm_eps=1e-6, tied=False, max_position=1024,
    )  # fmt: skip
    drawn = params.initialize(decoder.spec(cfg), jax.random.key(1))
    hf.export(folder, cfg, jax.tree.map(lambda x: x * 3, drawn))
    return folder


INDEX = {"10": ["<a_1>", "<b_0>"], "11": ["<a_1>", "<b_2>"], "12": ["<a_0>", "<b_0>"]}
NAMES = ["<a_0>", "<a_1>", "<b_0>", "<b_2>"]


@pytest.fixture
def minionerec(tmp_path: Path) -> tuple[Path, Path]:
    index = tmp_path / "Toys.index.json"
    index.write_text(json.dumps(INDEX))
    (tmp_path / "Toys.item.json").write_text(json.dumps({"10": {"title": "a kite"}}))
    return published(tmp_path / "hf", "qwen2", NAMES), index


def arguments(source: Path, items: Path, out: Path, family: str) -> list[str]:
    return [f"--checkpoint={source}", f"--items={items}", f"--family={family}", f"--out={out}"]


def test_minionerec(tmp_path: Path, minionerec: tuple[Path, Path]) -> None:
    source, index = minionerec
    out = tmp_path / "converted"
    done = convert(*arguments(source, index, out, "minionerec"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    assert "3 items behind 3 semantic ids of 2 levels" in done.stdout
    (cfg, weights), (theirs, original) = checkpoint.load(out), hf.load(source)
    assert cfg == theirs
    tokens = np.arange(24).reshape(2, 12).astype(np.int32)
    ours, expected = (
        decoder.logits(w, decoder.prefill(w, cfg, tokens, np.array([12, 12])).hidden)
        for w in (weights, original)
    )
    np.testing.assert_array_equal(ours, expected)

    config = load_config(out / "config.py")
    assert (config.model.path, config.beam.width, config.prompt.max_items) == (str(out), 3, 10)
    config = override(config, "model.compilation_cache=", "profiles.batch=1", "profiles.candidates=1")

    async def ask() -> list[tuple[str, float]]:
        engine = load_engine(config)
        await engine.start()
        answer = await engine.answer(RecommendRequest(history=["10", "12"], top_k=3))
        await engine.drain(10)
        return [(item.item_id, item.score) for item in answer.items]

    # By hand: the prompt through the tokenizer of the published folder, greedy token names, softmax over what is legal.
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    text = config.prompt.template.format(history="<a_1><b_0>, <a_0><b_0>")
    prompt = tokenizer.encode(text).ids

    def logits(*more: str) -> np.ndarray:
        ids = [*prompt, *map(tokenizer.token_to_id, more)]
        hidden = decoder.prefill(original, cfg, np.array([ids], np.int32), np.array([len(ids)])).hidden
        return np.asarray(decoder.logits(original, hidden), np.float64)[0, -1]

    def log_softmax(scores: np.ndarray, names: list[str], name: str) -> float:
        values = {n: scores[tokenizer.token_to_id(n)] for n in names}
        return float(values[name] - np.log(sum(np.exp(v) for v in values.values())))

    scores = {}
    for item_id, (a, b) in INDEX.items():
        legal = ["<b_0>", "<b_2>"] if a == "<a_1>" else ["<b_0>"]
        scores[item_id] = log_softmax(logits(), ["<a_0>", "<a_1>"], a) + log_softmax(logits(a), legal, b)
    best = sorted(scores, key=lambda item_id: -scores[item_id])
    found = asyncio.run(ask())
    assert [item_id for item_id, _ in found] == best
    np.testing.assert_allclose([score for _, score in found], [scores[i] for i in best], atol=1e-4)


def test_openonerec(tmp_path: Path) -> None:
    table = tmp_path / "sid2pid.json"
    table.write_text(json.dumps({
        str((1 * 8192 + 2) * 8192 + 3): [{"pid": 7, "count": 5}, {"pid": 8, "count": 1}],
        "0.2.8191": [{"pid": 9, "count": 3}],
    }))  # fmt: skip
    names = ["<s_a_0>", "<s_a_1>", "<s_b_2>", "<s_c_3>", "<s_c_8191>", "<|sid_begin|>", "<|sid_end|>"]
    source, out = published(tmp_path / "hf", "qwen3", names), tmp_path / "converted"
    done = convert(*arguments(source, table, out, "openonerec"))
    assert done.returncode == 0, done.stderr
    assert "3 items behind 2 semantic ids of 3 levels" in done.stdout
    engine = load_engine(override(load_config(out / "config.py"), "model.compilation_cache="))
    catalog = engine.translator.catalog
    assert catalog.item_ids == ("7", "9", "8")  # most popular first
    tokenizer = Tokenizer.from_file(source / "tokenizer.json")
    prompts = PromptBuilder(load_config(out / "config.py").prompt, tokenizer, catalog)
    expected = ["<|sid_begin|>", "<s_a_1>", "<s_b_2>", "<s_c_3>", "<|sid_end|>", "<|sid_begin|>"]
    assert prompts.build(np.array([0], np.int32)).tolist() == [tokenizer.token_id(name) for name in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no_token", "'<b_2>'"),
        ("adapter", "holds a LoRA adapter; merge it into its base model first"),
        ("no_tokenizer", "has no tokenizer.json; transformers writes one"),
        ("t5", "model_type 't5' is not supported"),
        ("short", "the model was made for 8"),
        ("damaged_items", "not readable as JSON"),
        ("no_family", "--family is not set"),
        ("no_folder", "is not a folder"),
    ],
)
def test_refusals(tmp_path: Path, minionerec: tuple[Path, Path], change: str, message: str) -> None:
    source, index = minionerec
    argv = arguments(source, index, tmp_path / "out", "lcrec")
    config = json.loads((source / "config.json").read_text())
    if change == "no_token":
        tokenizer = json.loads((source / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<b_2>"]
        (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif change == "adapter":
        (source / "adapter_config.json").write_text("{}")
    elif change == "no_tokenizer":
        (source / "tokenizer.json").unlink()
    elif change == "t5":
        (source / "config.json").write_text(json.dumps({**config, "model_type": "t5"}))
    elif change == "short":
        (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    elif change == "damaged_items":
        (tmp_path / "sid2pid.json").write_text('{"1": [')
        argv[1] = f"--items={tmp_path / 'sid2pid.json'}"
    elif change == "no_family":
        del argv[2]
    else:
        argv[0] = f"--checkpoint={tmp_path / 'nothing'}"
    done = convert(*argv)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "expected a JSON object, semantic id -> items"),
        ({"x.1.2": [{"pid": 1}]}, "'x.1.2' is no semantic id"),
        ({"1.2": [{"pid": 1}]}, "'1.2': expected 3 codes below 8192"),
        ({"8192.1.2": [{"pid": 1}]}, "expected 3 codes below 8192"),
        ({"1.1.2": []}, "expected a list of items"),
        ({"1.1.2": [{"count": 1}]}, "expected items such as"),
        ({"1.1.2": [{"pid": 1}], "1.1.3": [{"pid": 1}]}, "'1'"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, table: object, message: str) -> None:
    path = tmp_path / "sid2pid.json"
    path.write_text(json.dumps(table))
    with pytest.raises(CatalogError, match=r"sid2pid\.json: ") as caught:
        load_sid2pid(path)
    assert message in str(caught.value)
