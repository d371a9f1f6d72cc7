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

from jgr.catalog.catalog import CatalogError, load_catalog
from jgr.config import Config, override
from jgr.data.sid2pid import load_sid2pid
from jgr.models import checkpoint, decoder, hf, params
from jgr.models.decoder import DecoderConfig
from jgr.models.manifest import folder_config
from jgr.prompt.tokens import PromptBuilder, Tokenizer
from jgr.serving.api import RecommendRequest
from jgr.serving.decoders.loading import load_engine

prefill = jax.jit(decoder.prefill, static_argnames="cfg")
RUN = "import sys; from jgr.cli.main import run; sys.exit(run(['convert', *sys.argv[1:]]))"


def convert(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)


def published(folder: Path, family: str, names: list[str], seed: int = 1) -> Path:
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
    drawn = params.initialize(decoder.spec(cfg), jax.random.key(seed))
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


def by_hand(source: Path, prompt: str, ids: list[list[str]]) -> list[float]:
    """Each id's log-likelihood: the prompt through the published tokenizer, the published weights, one token at a time,
    softmax over what may follow."""
    tokenizer, (cfg, original) = (
        tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")),
        hf.load(source),
    )
    start, known = tokenizer.encode(prompt).ids, {}

    def logits(names: list[str]) -> np.ndarray:
        if tuple(names) not in known:
            tokens = [*start, *map(tokenizer.token_to_id, names)]
            padded = np.array([tokens + [0] * (len(ids[0]) - len(names))], np.int32)
            hidden = prefill(original, cfg, padded, np.array([len(tokens)])).hidden[0, len(tokens) - 1]
            known[tuple(names)] = np.asarray(decoder.logits(original, hidden), np.float64)
        return known[tuple(names)]

    scores = []
    for one in ids:
        score = 0.0
        for level, name in enumerate(one):
            legal = {other[level] for other in ids if other[:level] == one[:level]}
            row = logits(one[:level])
            over = sum(np.exp(row[tokenizer.token_to_id(n)]) for n in legal)
            score += float(row[tokenizer.token_to_id(name)] - np.log(over))
        scores.append(score)
    return scores


def recommend(config: Config, history: list[str], top_k: int) -> list[tuple[str, float]]:
    """What the engine answers."""
    config = override(
        config,
        "model.compilation_cache=",
        "profiles.batch=1",
        f"profiles.widths={top_k}",
    )

    async def ask() -> list[tuple[str, float]]:
        engine = load_engine(config, kinds=["recommend"])
        await engine.start()
        answer = await engine.answer(RecommendRequest(history=history, top_k=top_k))
        await engine.drain(10)
        return [(item.item_id, item.score) for item in answer.items]

    return asyncio.run(ask())


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
        decoder.logits(w, prefill(w, cfg, tokens, np.array([12, 12])).hidden) for w in (weights, original)
    )
    np.testing.assert_array_equal(ours, expected)

    config = folder_config(out)
    assert (config.model.path, config.beam.width, config.prompt.max_items) == (str(out), 3, 10)
    text = config.prompt.template.format(history="<a_1><b_0>, <a_0><b_0>")
    scores = by_hand(source, text, list(INDEX.values()))
    best = sorted(range(3), key=lambda i: -scores[i])
    found = recommend(config, ["10", "12"], 3)
    assert [item_id for item_id, _ in found] == [list(INDEX)[i] for i in best]
    np.testing.assert_allclose([score for _, score in found], [scores[i] for i in best], atol=1e-4)


def test_openonerec(tmp_path: Path) -> None:
    """Names from one tokenizer file to answers: ids as they are published, several items behind one, padded rows."""
    published_table = {
        str((1 * 8192 + 2) * 8192 + 3): [{"pid": 7, "count": 5}, {"pid": 8, "count": 1}],
        "0.2.8191": [{"pid": 9, "count": 3}],
        "1.2.0": [{"pid": 10, "count": 4}],
        "1.5.3": [{"pid": 11, "count": 2}],
    }
    table = tmp_path / "sid2pid.json"
    table.write_text(json.dumps(published_table))
    ids = [(1, 2, 3), (0, 2, 8191), (1, 2, 0), (1, 5, 3)]
    names_of = [[f"<s_{level}_{code}>" for level, code in zip("abc", one, strict=True)] for one in ids]
    names = [*dict.fromkeys(name for one in names_of for name in one), "<|sid_begin|>", "<|sid_end|>"]
    source, out = published(tmp_path / "hf", "qwen3", names), tmp_path / "converted"
    done = convert(*arguments(source, table, out, "openonerec"))
    assert done.returncode == 0, done.stderr
    assert "5 items behind 4 semantic ids of 3 levels" in done.stdout
    config = folder_config(out)
    catalog = load_catalog(out / "catalog.jsonl")
    assert catalog.item_ids == ("7", "10", "9", "11", "8")  # most popular first
    tokenizer = Tokenizer.from_file(source / "tokenizer.json")
    prompts = PromptBuilder(config.prompt, tokenizer, catalog)
    expected = ["<|sid_begin|>", "<s_a_1>", "<s_b_2>", "<s_c_3>", "<|sid_end|>", "<|sid_begin|>"]
    assert prompts.build(np.array([0], np.int32)).tolist() == [tokenizer.token_id(name) for name in expected]

    text = "".join(f"<|sid_begin|>{''.join(names_of[i])}<|sid_end|>" for i in (1, 0)) + "<|sid_begin|>"
    scores = by_hand(source, text, names_of)
    best = sorted(range(4), key=lambda i: -scores[i])
    items = [["7", "8"], ["9"], ["10"], ["11"]]
    want = [(item_id, scores[i]) for i in best for item_id in items[i]]
    found = recommend(override(config, "profiles.tokens=64", "prompt.max_items=4"), ["9", "7"], 5)
    assert [item_id for item_id, _ in found] == [item_id for item_id, _ in want]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in want], atol=1e-4)


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
        ("--heads=2", "--heads has no effect here: it is for --family=hstu"),
        ("--tables=float32", "--tables has no effect here: it is for --family=hstu"),
        ("--remote=redis://127.0.0.1:1/0", "--remote has no effect here: it is for --family=hstu"),
        ("--local_rows=3", "--local_rows has no effect here: it is for --family=hstu"),
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
    elif change.startswith("--"):
        argv.append(change)
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
        ('{"1.1.2": [{"pid": 1}], "1.1.2": [{"pid": 2}]}', "sid2pid.json: key '1.1.2' occurs twice"),
        ('{"1.1.2": [{"pid": 1, "pid": 2}]}', "sid2pid.json: key 'pid' occurs twice"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, table: object, message: str) -> None:
    path = tmp_path / "sid2pid.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    with pytest.raises(CatalogError, match=r"sid2pid\.json: ") as caught:
        load_sid2pid(path)
    assert message in str(caught.value)
