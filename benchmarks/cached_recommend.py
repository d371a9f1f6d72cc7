# SPDX-License-Identifier: Apache-2.0
"""`recommend` of one request at a time, all of whose history but its last token is cached, against the same uncached.

Both models stand in one server and have the same weights: "plain" computes every prompt (cache.policy=none), "cached"
keeps users (cache.policy=user). A client asks over HTTP, one request after the other, for the same user and history, so
that every answer but the first reuses all but one of its tokens. The profiles are the same. The answers' items must be
the same, too.

The compiled work of the smallest program that takes the request is in the rows, so that the time can be understood:
FLOPs, of which XLA counts a loop over layers once, and bytes of temporary arrays.

    python -m benchmarks.cached_recommend [--quick]
"""

from __future__ import annotations

import functools
import http.client
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.cache.memory import Memory
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, override
from jgr.models import checkpoint, decoder, params
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.http.listener import Listener
from jgr.serving.policies.jobs import Profile
from jgr.serving.versions.deployment import Deployment
from jgr.training.generator import decoder_config

LEVELS, CODES, N_ITEMS = 3, 256, 10_000
CACHED = (54, 129, 258, 513)
"""Cached tokens of a prompt: of whole items, before which one token stands."""
QUICK_CACHED = CACHED[:2]
FROM = 128
"""Cached tokens from which on the cache must pay."""
PATIENCE_S = 600.0
MODEL = (
    "train.layers=4",
    "train.hidden=256",
    "train.heads=4",
    "train.kv_heads=2",
    "train.head_dim=64",
    "train.mlp=704",
)
SETTINGS = (
    *MODEL,
    "model.compilation_cache=",
    "prompt.max_items=200",
    "profiles.tokens=64,256,1024",
    "profiles.batch=1",
    "profiles.candidates=8",
    "cache.device_mb=64",
    "cache.shadow=0",
    "server.port=0",
)
MODELS: Mapping[str, Sequence[str]] = {"plain": ("cache.policy=none",), "cached": ("cache.policy=user",)}


def write_model(folder: Path) -> None:
    """Random weights over a random catalog."""
    config = override(Config(), *SETTINGS)
    codes = np.unique(np.random.default_rng(0).integers(0, CODES, (N_ITEMS, LEVELS)), axis=0)
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes.tolist()]
    catalog = Catalog.build([str(row) for row in range(len(codes))], symbols, [{}] * len(codes))
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = decoder_config(config.train, tokenizer.vocab_size, 1024)

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, params.initialize(decoder.spec(cfg), jax.random.key(0)), write_beside)


@contextmanager
def serving(
    folder: Path, models: Mapping[str, Sequence[str]] = MODELS
) -> Iterator[tuple[str, dict[str, Engine[ServedDecoder]]]]:
    """The server's address, and its engines by name. models: each one's settings beyond SETTINGS."""
    configs = [
        override(Config(), *SETTINGS, f"model.path={folder}", f"model.name={name}", *settings)
        for name, settings in models.items()
    ]
    memory = Memory.of(*configs)
    engines = [load_engine(config, memory=memory) for config in configs]
    ready = threading.Event()
    listener = Listener(
        engines[0],
        configs[0],
        more=[Deployment(*each) for each in zip(engines[1:], (x.catalog for x in configs[1:]), strict=True)],
        on_progress=lambda done, total, label: harness.note(f"{done} of {total} compiled: {label}"),
        on_ready=lambda url: ready.set(),
    )
    thread = threading.Thread(target=listener.serve_until_stopped)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield listener.url.rpartition("/")[2], {e.info.id: e for e in engines}
    finally:
        listener.stop()
        thread.join()


def ask(connection: http.client.HTTPConnection, model: str, tokens: int) -> Any:
    """The answer to a request with so many cached tokens, if the model caches."""
    history = [str(7 * at % 5000) for at in range(tokens // LEVELS)]
    body = {"model": model, "user_id": f"u{tokens}", "history": history, "top_k": 10}
    connection.request("POST", "/v1/recommend", json.dumps(body))
    with connection.getresponse() as response:
        answer = json.loads(response.read())
        assert response.status == 200, answer
    return answer


def compiled(engine: Engine[ServedDecoder], prompt: int, cached: int) -> tuple[Profile, dict[str, float]]:
    """The smallest program that takes such a request, and what XLA says that it computes and needs."""
    executors = engine.served.executors
    assert isinstance(executors, DecoderExecutors)
    fitting = [
        profile
        for profile in executors.profiles
        if profile.kind == "recommend"
        and (profile.tokens >= prompt - cached if profile.packed else profile.tokens >= prompt)
        and profile.context >= cached
    ]
    best = min(fitting, key=lambda p: (p.tokens + p.context, p.batch))
    of = executors.paged if best.packed else executors.plain
    assert of is not None
    costs: Any = of._programs[best].cost_analysis()
    memory: Any = of._programs[best].memory_analysis()
    return best, {"gflop": costs["flops"] / 1e9, "temp_mb": memory.temp_size_in_bytes / 2**20}


def measure(quick: bool, quiet: Quiet) -> Measured:
    every, rounds = (QUICK_CACHED, 2) if quick else (CACHED, 7)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        with serving(Path(folder) / "model") as (address, engines):
            connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
            for tokens in every:
                rows += point(connection, engines, tokens, rounds, quiet)
            connection.close()
    return Measured(claims(rows), rows)


def point(
    connection: http.client.HTTPConnection,
    engines: dict[str, Engine[ServedDecoder]],
    tokens: int,
    rounds: int,
    quiet: Quiet,
) -> list[Row]:
    """Both models at one number of cached tokens."""
    answers = {name: [ask(connection, name, tokens) for _ in range(2)][-1] for name in engines}
    usage = answers["cached"]["usage"]
    assert (usage["cached_tokens"], usage["computed_tokens"]) == (tokens, 1), usage
    items = [[item["item_id"] for item in answer["items"]] for answer in answers.values()]
    assert items[0] == items[1], "the cache changed the answer"
    variants: dict[str, Callable[[], float]] = {
        name: functools.partial(milliseconds, connection, name, tokens) for name in engines
    }
    found = harness.interleave(variants, rounds, quiet)
    rows: list[Row] = []
    for name, engine in engines.items():
        reused = tokens if name == "cached" else 0
        profile, work = compiled(engine, tokens + 1, reused)
        shape = f"{profile.batch} x {profile.tokens} + {profile.context}"
        rows.append(
            {
                "model": name,
                "cached_tokens": tokens,
                "ms": harness.spread(found[name]),
                "shape": shape,
                **work,
            }
        )
    return rows


def milliseconds(connection: http.client.HTTPConnection, model: str, tokens: int) -> float:
    return harness.timed(lambda: ask(connection, model, tokens))[0]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """How many times as fast the cache makes a request, at least, from FROM cached tokens on; and at the least."""
    ratios: dict[int, float] = {}
    for tokens in {row["cached_tokens"] for row in rows}:
        plain, cached = (
            next(
                row["ms"]["median"] for row in rows if (row["cached_tokens"], row["model"]) == (tokens, name)
            )
            for name in ("plain", "cached")
        )
        ratios[tokens] = plain / cached
    least = min(ratio for tokens, ratio in ratios.items() if tokens >= FROM)
    return [
        Claim("cached-recommend-speedup", harness.rounded(least), "x", "higher", 1.0),
        Claim("cached-recommend-short-speedup", harness.rounded(ratios[CACHED[0]]), "x", "higher", 0.8),
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="cached_recommend",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
        )
    )
