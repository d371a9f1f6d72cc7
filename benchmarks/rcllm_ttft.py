# SPDX-License-Identifier: Apache-2.0
"""Reuse beyond the prefix: the time until the candidates are scored, for every method of the family on one engine.

A prompt is a history of 6 items in words, 20 candidates and a question; users are new, so that a prefix cache has
nothing, and all items have been computed alone before. full computes prompts whole, prefix too but with the cache in
place; naive, EPIC, CacheBlend and RcLLM are settings of one path (docs/cache.md, Blocks). Weights are random, since
times do not depend on them. Systems take turns, each with the same next requests, one request at a time.

The floor is what a method can gain where time is work: the token-layers of its plan over those of the whole prompt. The
layers are wide and their heads narrow, so that besides attention a token costs about twelve times what its attention to
1,000 others costs; in Qwen3-0.6B it is seven times. An answer with all tokens computed anew must be the whole prompt's.

    python -m benchmarks.rcllm_ttft [--quick]
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tokenizers

from benchmarks import harness
from benchmarks.bat_world import event_loop
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, TrainConfig, override
from jgr.models import checkpoint, decoder, params
from jgr.prompt.tokens import Tokenizer
from jgr.serving.api import Answer, RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.training.generator import decoder_config

WORDS, ITEMS = 500, 120
HISTORY, CANDIDATES = 6, 20
SHARES = (0.1, 0.3, 0.5)
AT = "rcllm .3"
PER_TURN = 2
"""Requests that a system serves in its turn."""
OF_FLOOR = 0.8
"""What is wanted of the gain that the floor allows."""


class System(NamedTuple):
    """A method. settings: of its engine. request: fields of its requests."""

    settings: tuple[str, ...]
    request: dict[str, object]


def systems(span: int) -> dict[str, System]:
    """By name. span: tokens of an item."""
    blocks = ("cache.policy=blocks",)
    chosen = (*blocks, "cache.repair_tokens=1", "cache.repair_by=attention")
    found = {
        "full": System(("cache.policy=none",), {"layout": "causal"}),
        "prefix": System((*blocks, f"cache.repair_tokens={span}"), {}),
        "naive": System(blocks, {}),
        "epic 2": System((*blocks, "cache.repair_tokens=2"), {}),
        "cacheblend .3": System((*blocks, "cache.repair_share=0.3"), {}),
    }
    for share in SHARES:
        found[f"rcllm {share:g}".replace(" 0.", " .")] = System((*chosen, f"cache.repair_share={share}"), {})
    return found


class World:
    """A model of some layers and items of `span` tokens each, as a folder."""

    def __init__(self, folder: Path, layers: int, span: int) -> None:
        self.folder, self.layers, self.span = folder, layers, span
        self._rng = np.random.default_rng(layers)
        titles = [" ".join(f"w{w}" for w in self._rng.integers(0, WORDS, span - 1)) for _ in range(ITEMS)]
        names = [[f"<i_{row}>"] for row in range(ITEMS)]
        catalog = Catalog.build([str(row) for row in range(ITEMS)], names, [{"title": t} for t in titles])
        words = ["<pad>", "<bos>", "<sid>", "<unk>", *(f"w{n}" for n in range(WORDS)), *catalog.symbols[0]]
        inner = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({str(word): at for at, word in enumerate(words)}, unk_token="<unk>")
        )
        inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        special = [str(word) for word in words if str(word).startswith("<")]
        inner.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in special])
        shape = TrainConfig(hidden=384, layers=layers, heads=4, kv_heads=2, head_dim=32, mlp=1280)
        cfg = decoder_config(shape, len(words), 8192)

        def write_beside(folder: Path) -> None:
            Tokenizer(inner).save(folder / "tokenizer.json")
            save_catalog(catalog, folder / "catalog.jsonl")

        drawn = params.initialize(decoder.spec(cfg), jax.random.key(0))
        checkpoint.save(folder, cfg, drawn, write_beside)
        self.bytes_per_token = 2 * layers * cfg.kv_heads * cfg.head_dim * 4

    @property
    def tokens(self) -> int:
        """The tokens of a prompt."""
        return (HISTORY + CANDIDATES) * self.span + 2

    def config(self, system: System, cache: str) -> Config:
        most = -(-self.tokens // 128) * 128
        own, all = HISTORY * self.span + 2, CANDIDATES * self.span
        wanted = (
            own,
            own + 2 * CANDIDATES,
            *(own + CANDIDATES + math.ceil(share * all) for share in SHARES),
            most,
        )
        sizes = sorted({-(-tokens // 32) * 32 for tokens in wanted})
        copies = most + (HISTORY + CANDIDATES) * self.span  # where an item is missed, it is computed twice
        pages_mb = 2 * (ITEMS + 16) * self.span * self.bytes_per_token / 2**20
        return override(
            Config(),
            f"model.path={self.folder}",
            f"model.compilation_cache={cache}",
            "prompt.template=<bos>{history}",
            "prompt.item={title}{sid}",
            f"prompt.max_items={HISTORY}",
            "rank.method=item_token",
            "rank.item={title}{sid}",
            f"rank.item_span={self.span}",
            "rank.requests=1",
            f"rank.tokens={','.join(map(str, [*sizes, copies]))}",
            f"rank.context={most}",
            f"rank.candidates={CANDIDATES}",
            f"batching.max_tokens={copies}",
            f"cache.device_mb={pages_mb:.1f}",
            "cache.item_share=0.9",
            "cache.shadow=0",
            "profiles.batch=1",
            f"profiles.tokens={-(-(HISTORY * self.span + 2) // 64) * 64}",
            *system.settings,
        )

    def rows(self) -> list[str]:
        """Items of a history and candidates, drawn anew."""
        found: list[str] = self._rng.permutation(ITEMS)[: HISTORY + CANDIDATES].astype(str).tolist()
        return found


class Served(NamedTuple):
    """A request: milliseconds until its answer, and that."""

    ms: float
    answer: Answer


class Running:
    """A system's engine, which has computed every item. requests: rows of the items that it is asked for, in turn."""

    def __init__(
        self,
        world: World,
        system: System,
        loop: asyncio.AbstractEventLoop,
        cache: str,
        requests: Sequence[Sequence[str]],
    ) -> None:
        self._loop, self._fields, self._requests, self._next = loop, system.request, requests, 0
        self.engine = load_engine(world.config(system, cache))
        loop.run_until_complete(self.engine.start())
        rows = [str(row) for row in range(ITEMS)]
        for at in range(0, ITEMS, CANDIDATES):
            self.serve([*rows[:HISTORY], *rows[at : at + CANDIDATES]])

    def serve(self, rows: Sequence[str], **fields: object) -> Served:
        given = {"history": rows[:HISTORY], "candidates": rows[HISTORY:], **self._fields, **fields}
        request = RankRequest(**given)  # type: ignore[arg-type]
        start_s = time.perf_counter()
        answer = self._loop.run_until_complete(self.engine.answer(request))
        return Served((time.perf_counter() - start_s) * 1e3, answer)

    def turn(self) -> list[Served]:
        """The next requests."""
        at, self._next = self._next, self._next + PER_TURN
        return [self.serve(rows) for rows in self._requests[at : at + PER_TURN]]

    def stop(self) -> None:
        self._loop.run_until_complete(self.engine.drain(None))


def floor(name: str, layers: int, answer: Answer) -> float:
    """How much faster the method would be if time were token-layers."""
    whole, computed = answer.usage.prompt_tokens, answer.usage.computed_tokens
    first = whole if name.startswith("cacheblend") else computed
    return layers * whole / (first + (layers - 1) * computed)


def scores(answer: Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of a score."""
    mine, its = scores(one), scores(other)
    return max(abs(mine[item] - its[item]) for item in its)


def measure(quick: bool, quiet: Quiet) -> Measured:
    worlds = ((4, 16),) if quick else ((4, 39), (4, 78), (4, 157), (8, 39), (8, 78), (8, 157), (28, 39))
    rounds = 2 if quick else 7
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="jgr-rcllm-") as folder, event_loop() as loop:
        for layers, span in worlds:
            world = World(Path(folder) / f"{layers}-{span}", layers, span)
            requests = [world.rows() for _ in range(20 * PER_TURN)]
            running = {
                name: Running(world, system, loop, f"{folder}/xla", requests)
                for name, system in systems(span).items()
            }
            found = harness.interleave({name: each.turn for name, each in running.items()}, rounds, quiet)
            whole = running["full"].serve(requests[0]).answer
            anew = running[AT].serve(requests[0], reuse_budget=1).answer
            rows += [
                row(name, layers, [one for turn in turns for one in turn], found["full"])
                for name, turns in found.items()
            ]
            rows[-1]["whole_when_all_is_computed"] = rounded(difference(anew, whole))
            for each in running.values():
                each.stop()
    return Measured(claims(rows), rows)


def row(name: str, layers: int, served: Sequence[Served], full: Sequence[Sequence[Served]]) -> Row:
    whole = [one for turn in full for one in turn]
    answer, ms = served[-1].answer, [one.ms for one in served]
    ratios = [a.ms / b.ms for a, b in zip(whole, served, strict=True)]
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), (2.5, 97.5))
    timing = answer.timing_ms
    return {
        "method": name,
        "layers": layers,
        "prompt_tokens": answer.usage.prompt_tokens,
        "computed_tokens": answer.usage.computed_tokens,
        "ms": harness.spread(ms),
        "device_ms": rounded(timing.device),
        "queue_and_prepare_ms": rounded(timing.queue + timing.prepare),
        "faster_than_full": rounded(float(np.median(ratios))),
        "interval": [rounded(float(low)), rounded(float(high))],
        "floor_allows": rounded(floor(name, layers, answer)),
        "score_difference": rounded(
            float(np.mean([difference(a.answer, b.answer) for a, b in zip(served, whole, strict=True)]))
        ),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = []
    for each in rows:
        if each["method"] != AT:
            continue
        low, high = each["interval"]
        share = each["floor_allows"]
        found.append(
            Claim(
                f"rcllm-of-what-its-plan-allows-{each['layers']}-layers-{each['prompt_tokens']}-tokens",
                rounded(each["faster_than_full"] / share),
                "",
                "higher",
                OF_FLOOR,
                interval=(rounded(low / share), rounded(high / share)),
            )
        )
    whole = max(each["whole_when_all_is_computed"] for each in rows if "whole_when_all_is_computed" in each)
    found.append(Claim("rcllm-with-all-computed-anew-from-the-whole-prompt", whole, "", "lower", 1e-3))
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_ttft",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
            device=jax.default_backend(),
        )
    )
