# SPDX-License-Identifier: Apache-2.0
"""Run by test_tensor_parallel.py in a process of 8 devices: one model's answers by their number, as a line of JSON."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

import jgr  # noqa: E402
from jgr.catalog.catalog import Catalog, save_catalog  # noqa: E402
from jgr.config import Config, override  # noqa: E402
from jgr.models import checkpoint, hf, params  # noqa: E402
from jgr.models.decoder import DecoderConfig  # noqa: E402
from jgr.models.generators import GeneratorConfig, generator  # noqa: E402
from jgr.models.lazy_decoder import LazyConfig  # noqa: E402
from jgr.prompt.tokens import semantic_id_tokenizer  # noqa: E402

SUMS = re.compile(r" = \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
HISTORIES = [[f"i{n}" for n in range(first, first + length)] for first, length in ((0, 9), (5, 4), (11, 12))]
GROWN = [*HISTORIES[0], "i20", "i21"]
CANDIDATES = [f"i{n}" for n in range(3, 28, 2)]


def items(depth: int) -> Catalog:
    """30 items, of one level with a token each, or of ids of several codes."""
    codes = np.arange(30)[:, None] if depth == 1 else np.random.default_rng(0).integers(0, 6, (30, depth))
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    return Catalog.build([f"i{n}" for n in range(30)], symbols, [{"segments": [f"k{n % 3}"]} for n in range(30)])


def folder(path: Path, cfg: GeneratorConfig, catalog: Catalog, *, exported: bool) -> None:
    """A model folder with random weights, as `jgr train` or as Hugging Face writes it."""
    drawn = jax.tree.map(lambda x: x * 3, params.initialize(generator(cfg).spec(cfg), jax.random.key(0)))

    def write_beside(path: Path) -> None:
        semantic_id_tokenizer(catalog).save(path / "tokenizer.json")
        save_catalog(catalog, path / "catalog.jsonl")

    if exported and isinstance(cfg, DecoderConfig):
        hf.export(path, cfg, drawn)
        write_beside(path)
    else:
        checkpoint.save(path, cfg, drawn, write_beside)


def answers(path: Path, devices: int, *settings: str) -> dict[str, Any]:
    """Items and scores of every kind of request, in the order of the items' names, and what the engine is made of."""
    config = override(
        Config(), "model.compilation_cache=", f"model.path={path}", "profiles.tokens=64", "beam.width=8",
        "prompt.max_items=12", "profiles.batch=4", "profiles.widths=8", "profiles.candidates=16",
        f"model.tensor_parallel={devices}", *settings,
    )  # fmt: skip
    found: dict[str, Any] = {}
    with jgr.Engine(config) as engine:

        def scores(answer: Any) -> list[tuple[str, float]]:
            return sorted((item.item_id, item.score) for item in answer.items)

        found["recommend"] = [scores(engine.recommend(one, top_k=8)) for one in HISTORIES]
        found["batch"] = [scores(one) for one in engine.recommend(HISTORIES, top_k=8)]
        found["filtered"] = scores(
            engine.recommend(HISTORIES[0], top_k=4, filters={"deny": CANDIDATES[:5], "segments": ["k1"]})
        )
        for name in ("cold", "warm"):
            asked = [
                engine.rank(one, CANDIDATES, user_id=f"u{at}") for at, one in enumerate(HISTORIES)
            ]
            found[name] = [scores(one) for one in asked]
            found[f"{name}_tokens"] = [one.usage.cached_tokens for one in asked]
        grown = engine.rank(GROWN, CANDIDATES, user_id="u0")
        found["grown"], found["grown_tokens"] = scores(grown), grown.usage.cached_tokens
        served = engine._thread.models.deployments[0].engine.served
        found["sums"] = [Counter(SUMS.findall(text)) for text in served.executors.program_texts()]
        found["metrics"] = re.findall(r"jgr_compilations_total\{.*request.*\} (\S+)", engine.metrics())
    return found


def decoder_of(vocabulary: int, family: str = "qwen3", kv_heads: int = 4) -> DecoderConfig:
    return DecoderConfig(
        family=family, vocab_size=vocabulary, hidden=32, layers=2, heads=8, kv_heads=kv_heads, head_dim=8,
        mlp=48, rope_theta=1e4, norm_eps=1e-6, tied=family != "llama", max_position=128,
    )  # fmt: skip


RANKING = (
    "prompt.template=<bos>{history}<sid>", "rank.method=item_token", "rank.item=<sid>{sid}", "rank.item_span=4",
    "rank.requests=4", "rank.tokens=128", "rank.context=64", "rank.candidates=16", "cache.policy=hotness",
    "cache.device_mb=0.2", "cache.page_kb=2",
)  # fmt: skip

if __name__ == "__main__":
    place = Path(sys.argv[1])
    catalog = items(1)
    folder(place / "ranks", decoder_of(semantic_id_tokenizer(catalog).vocab_size), catalog, exported=False)
    print(json.dumps({count: answers(place / "ranks", count, *RANKING) for count in (1, 2, 4, 8)}))
