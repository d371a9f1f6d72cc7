# SPDX-License-Identifier: Apache-2.0
"""Run by test_tensor_parallel.py in a process of 8 devices: models' answers on some of them, as a line of JSON."""

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
from jgr.models import checkpoint, decoder, hf, params, retrievers  # noqa: E402
from jgr.models.decoder import DecoderConfig  # noqa: E402
from jgr.models.devices import Devices  # noqa: E402
from jgr.models.generators import GeneratorConfig, generator  # noqa: E402
from jgr.models.hstu import HstuConfig  # noqa: E402
from jgr.models.lazy_decoder import LazyConfig  # noqa: E402
from jgr.models.sasrec import SasrecConfig  # noqa: E402
from jgr.ops import split  # noqa: E402
from jgr.prompt.tokens import level_tokens, semantic_id_tokenizer  # noqa: E402
from jgr.serving.engine.compilation import compiled  # noqa: E402

PLAIN = (
    "model.compilation_cache=", "profiles.tokens=64", "beam.width=8", "prompt.max_items=12", "profiles.batch=4",
    "profiles.widths=8", "profiles.candidates=16",
)  # fmt: skip
RANKING = (
    "prompt.template=<bos>{history}<sid>", "rank.method=item_token", "rank.item=<sid>{sid}", "rank.item_span=4",
    "rank.requests=4", "rank.tokens=128", "rank.context=64", "rank.candidates=16", "cache.policy=hotness",
    "cache.device_mb=0.2", "cache.page_kb=2", "cache.host_mb=0.2", "cache.new_tokens=32",
)  # fmt: skip
SUMS = re.compile(
    r" = (?:\([^)]*\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
PLACE = re.compile(r'op_name="[^"]*/(attention|mlp|prefill|decode|beam_step|score)[_/\d]')
HISTORIES = [[f"i{n}" for n in range(first, first + length)] for first, length in ((0, 9), (5, 4), (11, 12))]
GROWN = [*HISTORIES[0], "i20", "i21"]
CANDIDATES = [f"i{n}" for n in range(3, 28, 2)]


def items(depth: int) -> Catalog:
    """30 items, of one level with a token each, or of ids of several codes."""
    codes = np.arange(30)[:, None] if depth == 1 else np.random.default_rng(0).integers(0, 6, (30, depth))
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    return Catalog.build(
        [f"i{n}" for n in range(30)], symbols, [{"segments": [f"k{n % 3}"]} for n in range(30)]
    )


def folder(path: Path, cfg: GeneratorConfig, catalog: Catalog, *, exported: bool, seed: int = 0) -> None:
    """A model folder with random weights, as `jgr train` or as Hugging Face writes it."""
    drawn = jax.tree.map(
        lambda x: 3 * np.asarray(x), params.initialize(generator(cfg).spec(cfg), jax.random.key(seed))
    )

    def write_beside(path: Path) -> None:
        semantic_id_tokenizer(catalog).save(path / "tokenizer.json")
        save_catalog(catalog, path / "catalog.jsonl")

    if exported and isinstance(cfg, DecoderConfig):
        hf.export(path, cfg, drawn)
        write_beside(path)
    else:
        checkpoint.save(path, cfg, drawn, write_beside)


Scores = list[tuple[str, float]]


def scores(answer: Any) -> Scores:
    """The items by their names, so that ties may change places."""
    return sorted((item.item_id, item.score) for item in answer.items)


def sums(engine: jgr.Engine) -> list[Counter[str]]:
    """What the devices tell each other in each program, by operation and place."""
    executors, found = engine._thread.models.deployments[0].engine.served.executors, []
    for text in executors.program_texts():
        lines = [(SUMS.search(line), PLACE.search(line)) for line in text.splitlines()]
        found.append(Counter(f"{sum[1]} {place[1] if place else '?'}" for sum, place in lines if sum))
    return found


def share(engine: jgr.Engine) -> float:
    """The part of the weights' bytes that stands on the first device."""
    weights = jax.tree.leaves(engine._thread.models.deployments[0].engine.served.executors.plain._params)
    return sum(x.addressable_shards[0].data.nbytes for x in weights) / sum(x.nbytes for x in weights)


def generated(engine: jgr.Engine) -> dict[str, Scores]:
    """What a decoder generates, one request at a time, in a batch, and with filters of both kinds."""
    filters = {"deny": CANDIDATES[:5], "segments": ["k1"]}
    found = {f"alone {at}": scores(engine.recommend(one, top_k=8)) for at, one in enumerate(HISTORIES)}
    batch = engine.recommend(HISTORIES, top_k=8)
    found |= {f"batch {at}": scores(one) for at, one in enumerate(batch)}
    return found | {"filtered": scores(engine.recommend(HISTORIES[0], top_k=4, filters=filters))}


def ranked(engine: jgr.Engine, **fields: Any) -> dict[str, Scores]:
    return {f"rank {at}": scores(engine.rank(one, CANDIDATES, **fields)) for at, one in enumerate(HISTORIES)}


def cached(engine: jgr.Engine) -> tuple[dict[str, Scores], list[int]]:
    """Rankings of users whom the cache does not have, has, and has with a shorter history; and what it had."""
    found, tokens = {}, []
    for name, histories in (("cold", HISTORIES), ("warm", HISTORIES), ("grown", [GROWN])):
        for user, history in enumerate(histories):
            answer = engine.rank(history, CANDIDATES, user_id=f"u{user}")
            found[f"{name} {user}"] = scores(answer)
            tokens.append(answer.usage.cached_tokens)
    return found, tokens


def answers(path: Path, devices: int, *settings: str) -> dict[str, Any]:
    """The answers of a model of any kind, and what its programs and its engine did for them."""
    chosen = (f"model.path={path}", f"model.tensor_parallel={devices}", *PLAIN, *settings)
    with jgr.Engine(override(Config(), *chosen)) as engine:
        found, tokens, told, part = {}, [], [], 0.0
        if engine.info.max_beam_width:
            found |= generated(engine)
            told, part = sums(engine), share(engine)
        if settings == RANKING:
            ranks, tokens = cached(engine)
            found |= ranks
        else:
            found |= ranked(engine)
        compiled = re.findall(r'jgr_compilations_total\{.*phase="request".*\} (\S+)', engine.metrics())
        return {"scores": found, "cached_tokens": tokens, "sums": told, "share": part, "compiled": compiled}


def decoder_of(catalog: Catalog, family: Any, rows: int = 1) -> DecoderConfig:
    """8 query heads on 4 key/value heads. rows: the vocabulary is filled up to a multiple of it."""
    vocabulary = -(-semantic_id_tokenizer(catalog).vocab_size // rows) * rows
    return DecoderConfig(
        family=family, vocab_size=vocabulary, hidden=32, layers=2, heads=8, kv_heads=4, head_dim=8,
        mlp=48, rope_theta=1e4, norm_eps=1e-6, tied=family != "llama", max_position=128,
    )  # fmt: skip


def onerec_of(catalog: Catalog) -> LazyConfig:
    tokens = [int(one[0]) for one in level_tokens(catalog, semantic_id_tokenizer(catalog), 1 << 20)]
    return LazyConfig(
        vocab_size=semantic_id_tokenizer(catalog).vocab_size, first_tokens=tuple(tokens), level_sizes=(6, 6),
        max_items=12, hidden=32, layers=2, heads=8, kv_heads=4, head_dim=8, mlp=48, experts=4, experts_active=2,
        expert_mlp=16, dense_layers=1,
    )  # fmt: skip


def scorers(place: Path, catalog: Catalog) -> None:
    """Of 2 heads each."""
    digest = retrievers.items_digest(catalog.item_ids)
    scorer(place / "hstu", HstuConfig(30, 12, 16, 2, 2, 8, 8, length=17, items=digest), catalog)
    scorer(place / "sasrec", SasrecConfig(30, 12, 16, 2, 2, mlp=16, items=digest), catalog)


def scorer(path: Path, cfg: retrievers.RetrieverConfig, catalog: Catalog) -> None:
    drawn = params.initialize(retrievers.retriever(cfg).spec(cfg), jax.random.key(0))
    retrievers.save(path, cfg, drawn, lambda path: save_catalog(catalog, path / "catalog.jsonl"))


def in_8_bits(path: Path, count: int) -> dict[str, Any]:
    """The logits after a prompt with weights in 8 bits, the number of sums, and the first device's part of weights."""
    devices, tokens = Devices.of(count), np.arange(3, 19, dtype=np.int32)[None]
    cfg, weights = checkpoint.load(path, devices=devices, kind="int8")

    def call(weights: Any, tokens: Any, lengths: Any) -> jax.Array:
        last, _ = decoder.begin(weights, cfg, tokens, lengths)
        return split.everywhere(decoder.logits(weights, last))

    given = weights, devices.place(tokens), devices.place(np.array([16], np.int32))
    program = compiled(call, *given, key=("in 8 bits", count))
    found = [SUMS.search(line) for line in program.as_text().splitlines()]
    matrices = [x for x in jax.tree.leaves(weights.layers) if x.dtype == np.int8]
    part = sum(x.addressable_shards[0].data.nbytes for x in matrices) / sum(x.nbytes for x in matrices)
    return {
        "logits": np.asarray(program(*given)).ravel().tolist(),
        "sums": sum(bool(one) for one in found),
        "share": part,
    }


if __name__ == "__main__":
    place, flat, deep = Path(sys.argv[1]), items(1), items(2)
    folder(place / "ranker", decoder_of(flat, "qwen3"), flat, exported=False)
    folder(place / "llama", decoder_of(deep, "llama", rows=8), deep, exported=True)
    folder(place / "onerec", onerec_of(deep), deep, exported=False)
    scorers(place, flat)
    runs = {
        "ranker": ((1, 8), RANKING),
        "llama": ((1, 4), ("beam.normalize=full",)),
        "onerec": ((1, 2), ("prompt.template={history}",)),
        "hstu": ((1, 2), ("executors.sizes=16", "executors.number=1")),
        "sasrec": ((1, 4), ("executors.sizes=16", "executors.number=1")),
    }
    chosen = sys.argv[2:] or list(runs)
    print(
        json.dumps(
            {
                name: {count: answers(place / name, count, *settings) for count in counts}
                for name, (counts, settings) in runs.items()
                if name in chosen
            }
            | {"in 8 bits": {count: in_8_bits(place / "llama", count) for count in (1, 4)}}
        )
    )
