# SPDX-License-Identifier: Apache-2.0
"""Items over the replicas of a fleet, live: replicate, hash and HRCS in processes of their own, on links of two speeds.

Each node is a process with a replica as `jgr cluster` has it, without Ray: the same store, transport and steps, told by
the same coordinator. Bytes go over sockets on the loopback. A token bucket in the owner makes a link as slow as one of
10 or 100 Gb/s would be for the paper's model: links pass as many times fewer tokens a second as this machine computes
fewer of them than the paper's (benchmarks/bat_nodes.py says how that is reckoned). It is an emulation.

Requests have popular candidates, by Zipf's law, and their items come first. Two things are measured, of the same nodes:

- Bytes. Every missing item is fetched (fleet.fetch=always) and nothing is kept, one request after the other, so that
  what passes a link is what the placement predicts, request by request (`expected_bytes`); the series counted it.
- Requests a second, as the nodes serve by default: a missing item is fetched where that is cheaper than to compute it,
  and kept, and some requests are in flight at each node, so that one waits for its items while another is computed.

Two sizes of a node's memory for items: it could hold more than all of them, or six tenths, so that replicate drops
some. All placements have the same; where items are fetched, ROOM of it is for those. Prompts are compiled for many
numbers of tokens, since with few of them a missing item is computed in what would be filled up anyway, at no cost.

What the paper's order needs, HRCS first and hash behind replicate at 10 Gb/s: memory that is short, and something
that wants what HRCS leaves free (`held`). There those are users' caches; here they are the items that replicate drops,
for no user's cache is in play, as benchmarks/bat_placement.py has it. With all items on each node nothing is faster
than replicate, and HRCS can at best come near it. Nor is a fetch worth much where a link of 10 Gb/s passes no more
tokens a second than the device computes, as it does in the paper's own numbers: there the nodes compute what they lack.

Replicate uses no link, so what its rows on two links differ by is chance: new processes, of which a ratio of two
placements has as much.

The nodes share one machine's cores, so requests a second are not those of as many machines, and what a transfer costs
the owner's processor is taken from the reader's. `processor_ms` is what a request took of all nodes' processors.

    python -m benchmarks.fleet_items [--quick]
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import bat_nodes, harness
from benchmarks.bat_nodes import GBITS, PREFILL_S, link_tokens
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, FleetConfig, override
from jgr.models import checkpoint, decoder, manifest, params
from jgr.placement.items import ItemPlacement, expected_bytes
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.traffic.workloads import BOOKS
from jgr.training.generator import decoder_config

Int32 = npt.NDArray[np.int32]
NODES = 2
PLACEMENTS = ("replicate", "hash", "hrcs")
ITEM_LENGTH = 8
SPAN = 16


class Size(NamedTuple):
    """candidates: of a request. requests: to each node, in a round. in_flight: of them, at once. sizes: of a node's
    memory for items, over that of all items. shapes: numbers of tokens to compile for."""

    items: int
    candidates: int
    requests: int
    in_flight: int
    rounds: int
    hidden: int
    layers: int
    shapes: int
    sizes: Mapping[str, float]

    @property
    def events(self) -> int:
        """Items of a history: it has as many tokens as the candidates, about as in the paper."""
        return self.candidates * ITEM_LENGTH // 2


FULL = Size(2000, 50, 30, 3, 3, 256, 4, 8, {"large": 1.2, "small": 0.6})
QUICK = Size(40, 6, 4, 2, 1, 32, 2, 1, {"small": 0.6})
ROOM = 0.1
"""The memory of a node for items that it fetched, over that of all items."""


def write_model(folder: Path, size: Size) -> Config:
    """A folder with random weights over items of ITEM_LENGTH tokens each."""
    names = [f"i{row}" for row in range(size.items)]
    rng = np.random.default_rng(0)
    ids = [[f"<a_{row // 100}>", f"<b_{row % 100}>"] for row in range(size.items)]
    words = [
        " ".join(f"<b_{n}>" for n in rng.integers(0, min(60, size.items), ITEM_LENGTH - 2)) for _ in names
    ]
    catalog = Catalog.build(names, ids, [{"title": text.replace(" ", "")} for text in words])
    tokenizer = semantic_id_tokenizer(catalog)
    user = 2 * size.events + 16
    most = size.candidates * ITEM_LENGTH
    tokens = user + size.candidates + most + 16
    # Finer where few items are missing: a prompt is filled up to the next of them.
    shapes = sorted(
        {tokens - most + round(most * (step / size.shapes) ** 2) for step in range(1, size.shapes + 1)}
    )
    config = override(
        Config(),
        f"model.path={folder}",
        f"model.compilation_cache={folder.parent / 'xla'}",
        f"train.layers={size.layers}",
        f"train.hidden={size.hidden}",
        f"prompt.max_items={size.events}",
        "prompt.template=<bos>{history}<sid>",
        "rank.method=item_probe",
        "rank.item={title}{sid}",
        "rank.probe=<sid>",
        "rank.positive=<b_1>",
        "rank.negative=<b_2>",
        f"rank.item_span={SPAN}",
        "rank.requests=1",
        f"rank.tokens={','.join(map(str, shapes))}",
        f"rank.context={tokens}",
        f"rank.candidates={size.candidates}",
        "profiles.batch=1",
        f"profiles.tokens={user}",
        "profiles.widths=4",
        "beam.width=4",
        "cache.policy=item",
        "cache.shadow=0",
    )
    cfg = decoder_config(config.train, tokenizer.vocab_size, 2048)

    def write_beside(to: Path) -> None:
        tokenizer.save(to / "tokenizer.json")
        save_catalog(catalog, to / "catalog.jsonl")

    checkpoint.save(folder, cfg, params.initialize(decoder.spec(cfg), jax.random.key(0)), write_beside)
    manifest.write(folder, config, catalog)
    return config


def node(pipe: Connection, folder: str, settings: Sequence[str], name: str) -> None:
    """A process with a replica that does what comes through the pipe."""
    asyncio.run(_node(pipe, folder, settings, name))


async def _node(pipe: Connection, folder: str, settings: Sequence[str], name: str) -> None:
    from jgr.placement.transport import Bucket
    from jgr.serving.cluster.hints import Hint
    from jgr.serving.cluster.record import NoOthers
    from jgr.serving.cluster.replica import Replica, Source

    bucket = Bucket(1e12)
    replica = Replica(Source((folder,), assignments=tuple(settings)), name, NoOthers(), bucket=bucket)
    await replica.start()
    pipe.send(replica.models.infos[0].id)
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        what, *arguments = told
        if what == "items":
            pipe.send((await replica.items(Hint(), *arguments))[1])
        elif what == "speed":
            bucket.bytes_per_s = arguments[0]
            pipe.send(None)
        elif what == "bytes":
            pipe.send(replica.models.render_metrics().decode())
        elif what == "fetch":
            assert replica.item_share is not None
            fetching, keep = arguments
            replica.item_share.fleet = replace(replica.item_share.fleet, fetch=fetching, keep_fetched=keep)
            pipe.send(None)
        else:
            pipe.send(await _serve(replica, *arguments))
    await replica.end()
    pipe.close()
    os._exit(0)  # Ray alone calls the replica's __del__


class Served(NamedTuple):
    """What a node's requests took: seconds in all, seconds of its processors, and the tokens that were computed."""

    seconds: float
    processor_s: float
    computed: int


async def _serve(replica: Any, bodies: Sequence[bytes], in_flight: int) -> Served:
    """Answer requests, so many of them at once."""
    import msgspec

    from jgr.serving.cluster.hints import glance
    from jgr.serving.cluster.relay import Asked

    computed, left, begun = 0, iter(bodies), (time.perf_counter(), time.process_time())

    async def one_after_the_other() -> None:
        nonlocal computed
        for body in left:
            asked = Asked("POST", "/v1/rank", b"", [(b"content-length", b"%d" % len(body))], body)
            answered = await replica.answer(glance("/v1/rank", body), asked)
            assert answered.status == 200, answered.body
            computed += msgspec.json.decode(answered.body)["usage"]["computed_tokens"]

    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return Served(time.perf_counter() - begun[0], time.process_time() - begun[1], computed)


class Fleet:
    """The processes, as the coordinator sees them."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for name in "abcdefgh"[:NODES]:
            ours, theirs = context.Pipe()
            process = context.Process(target=node, args=(theirs, str(folder), settings, name), daemon=True)
            process.start()
            theirs.close()
            self._pipes[name] = ours
            self._processes.append(process)
        for pipe in self._pipes.values():
            pipe.recv()

    async def ask(self, name: str, *told: Any) -> Any:
        pipe = self._pipes[name]
        pipe.send(told)
        return await asyncio.to_thread(pipe.recv)

    async def ask_all(self, *told: Any) -> dict[str, Any]:
        found = await asyncio.gather(*(self.ask(name, *told) for name in self._pipes))
        return dict(zip(self._pipes, found, strict=True))

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        return await self.ask(name, "items", what, *arguments)

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        found = await self.ask_all("items", what, *arguments)
        return {name: answer for name, answer in found.items() if answer is not None}

    async def serve(
        self, requests: Mapping[str, Sequence[Int32]], size: Size, in_flight: int
    ) -> list[Served]:
        """What each node's requests took, all nodes at once."""
        told = [self.ask(name, "serve", bodies(rows, size), in_flight) for name, rows in requests.items()]
        found: list[Served] = await asyncio.gather(*told)
        return found

    async def counted(self) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
        """The bytes for requests from each node to each other one, [NODES, NODES], and what became of items that were
        missing, since the start."""
        from prometheus_client.parser import text_string_to_metric_families

        moved, missing = np.zeros((NODES, NODES), np.int64), {"fetched": 0, "computed": 0}
        for text in (await self.ask_all("bytes")).values():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == "jgr_fleet_item_bytes_total" and sample.labels["purpose"] == "request":
                        moved[int(sample.labels["from"]), int(sample.labels["to"])] += round(sample.value)
                    elif sample.name == "jgr_fleet_items_missing_total":
                        missing[sample.labels["outcome"]] += round(sample.value)
        return moved, missing

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def traffic(size: Size, seed: int) -> dict[str, list[Int32]]:
    """The candidates of each node's requests, popular ones more often."""
    rng = np.random.default_rng(seed)
    weight = 1 / np.arange(1, size.items + 1) ** 1.07
    share = weight / weight.sum()
    return {
        name: [
            rng.choice(size.items, size.candidates, replace=False, p=share).astype(np.int32)
            for _ in range(size.requests)
        ]
        for name in "abcdefgh"[:NODES]
    }


def bodies(requests: Sequence[Int32], size: Size, layout: str = "item_prefix") -> list[bytes]:
    import msgspec

    history = [f"i{event % size.items}" for event in range(size.events)]
    return [
        msgspec.json.encode(
            {"history": history, "candidates": [f"i{row}" for row in rows.tolist()], "layout": layout}
        )
        for rows in requests
    ]


async def measure_one(
    folder: Path,
    settings: Sequence[str],
    config: FleetConfig,
    size: Size,
    quiet: Quiet,
    gbit: int,
    slower: float,
) -> tuple[Row, float]:
    """The row of one placement in one size of memory, on links of one speed, and by how many times a node is slower
    than the paper's device. slower: what the first of these was, so that all have the same links; 0: this is the
    first."""
    from jgr.serving.cluster.placements import Placements

    fleet = await asyncio.to_thread(Fleet, folder, settings)
    try:
        # Some requests have to be seen before anything can be placed well; these leave no item on a device.
        asked = {name: bodies(rows, size, "user_prefix") for name, rows in traffic(size, 0).items()}
        await asyncio.gather(*(fleet.ask(name, "serve", told, 1) for name, told in asked.items()))
        token_bytes = (await fleet.items("a", "facts"))["token_bytes"]
        slower = slower or await slowness(fleet)
        bytes_per_s = link_tokens(gbit) * slower * token_bytes
        placements = Placements(fleet, replace(config, link_gbit=bytes_per_s * 8e-9))
        tries = 50
        while not await placements.look():  # what is placed needs no slow link
            tries -= 1
            if not tries:
                raise Missing("the nodes could not be given their items; see the log")
        await fleet.ask_all("speed", bytes_per_s)
        assert placements.placement is not None
        found = await run(fleet, placements.placement, size, quiet)
        return {"gbit_per_s": gbit, "emulated_bytes_per_s": rounded(bytes_per_s), **found}, slower
    finally:
        await asyncio.to_thread(fleet.close)


async def slowness(fleet: Fleet) -> float:
    """By how many times fewer tokens a second a node computes than the paper's device."""
    counts = (await fleet.items_all("counts")).values()
    mine = np.mean([each["user_tokens"] / each["prefill_s"] for each in counts])
    return float(mine / (BOOKS.user_tokens / PREFILL_S))


async def run(fleet: Fleet, placement: ItemPlacement, size: Size, quiet: Quiet) -> Row:
    return {
        **await run_for_bytes(fleet, placement, size),
        **await run_for_speed(fleet, size, quiet),
        "replicated_items": rounded(placement.replicated_fraction, 3),
        "dropped_items": len(placement.dropped),
        "held": rounded(float(placement.used_bytes().max() / placement.items.room_bytes.sum()), 3),
    }


async def run_for_bytes(fleet: Fleet, placement: ItemPlacement, size: Size) -> Row:
    """One round in which all that is missing is fetched, and kept by nobody."""
    await fleet.ask_all("fetch", "always", False)
    before, _ = await fleet.counted()
    requests = traffic(size, 1)
    await fleet.serve(requests, size, 1)
    moved = (await fleet.counted())[0] - before
    reads = [(number, rows) for number, some in enumerate(requests.values()) for rows in some]
    predicted = expected_bytes(placement, reads, whole_cells=True)
    return {
        "bytes_from_to": moved.tolist(),
        "predicted_bytes_from_to": predicted.tolist(),
        "bytes_over_predicted": rounded(largest_error(moved, predicted)),
    }


async def run_for_speed(fleet: Fleet, size: Size, quiet: Quiet) -> Row:
    """Rounds as the nodes serve by default, after one that fills their caches."""
    defaults = FleetConfig()
    await fleet.ask_all("fetch", defaults.fetch, defaults.keep_fetched)
    await fleet.serve(traffic(size, 2), size, size.in_flight)
    speeds, processor_s, computed, missed = [], 0.0, 0, {"fetched": 0, "computed": 0}
    for seed in itertools.count(10):
        requests, start, (_, before) = traffic(size, seed), quiet.wait(), await fleet.counted()
        found = await fleet.serve(requests, size, size.in_flight)
        _, missing = await fleet.counted()
        if quiet.was_quiet_since(start):
            speeds.append(NODES * size.requests / max(each.seconds for each in found))
            processor_s += sum(each.processor_s for each in found)
            computed += sum(each.computed for each in found)
            missed = {outcome: missed[outcome] + missing[outcome] - before[outcome] for outcome in missed}
        if len(speeds) == size.rounds:
            break
    answered = size.rounds * NODES * size.requests
    return {
        "requests_per_s": harness.spread(speeds),
        "processor_ms": rounded(1e3 * processor_s / answered),
        "computed_tokens": rounded(computed / answered),
        **{f"{outcome}_items": rounded(number / answered, 3) for outcome, number in missed.items()},
    }


def largest_error(moved: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> float:
    """The largest share by which a link's bytes differ from what was predicted."""
    return float((np.abs(moved - predicted) / np.maximum(predicted, 1)).max())


def measure(quick: bool, quiet: Quiet) -> Measured:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    slower = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        config = write_model(model, size)
        of_all = size.items * ITEM_LENGTH * kv_bytes(config) / 2**20
        for (memory, share), placement in itertools.product(size.sizes.items(), PLACEMENTS):
            room = 0.0 if placement == "replicate" else ROOM  # it has nobody to fetch from
            settings = (
                f"fleet.items={placement}",
                f"fleet.items_mb={of_all * (share - room)}",
                f"fleet.fetched_mb={max(0.25, of_all * room)}",  # some pages at least, for a few small items
                f"fleet.replicas={NODES}",
                "fleet.fetch_ms=60000",
                "fleet.transport=socket",
                "fleet.refresh_s=100000",
                f"cache.device_mb={max(2.0, of_all / 4)}",
            )
            fleet = override(config, *settings).fleet
            for gbit in GBITS:  # new nodes each time: a device may keep what another placement had put there
                row, slower = asyncio.run(measure_one(model, settings, fleet, size, quiet, gbit, slower))
                rows.append({"memory": memory, "placement": placement, **row})
                harness.note(str(rows[-1]))
    return Measured(claims(rows), rows)


def kv_bytes(config: Config) -> int:
    """The bytes of a token's keys and values."""
    cfg = decoder_config(config.train, 1, 1)
    return 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * 4


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Bytes as predicted, and the paper's order of the placements on each link."""
    speed = {
        (row["memory"], row["gbit_per_s"], row["placement"]): row["requests_per_s"]["median"] for row in rows
    }
    found = [
        Claim(
            "fleet-items-bytes-against-prediction",
            max(row["bytes_over_predicted"] for row in rows),
            "",
            "lower",
            0.02,
            "The largest share by which a link's bytes differ from what the placement predicts",
        )
    ]
    for (memory, gbit, placement), value in speed.items():
        base = speed[memory, gbit, "replicate"]
        if placement == "hrcs":
            title = f"Requests a second of HRCS over replicate, {gbit} Gb/s emulated, {memory} memory"
            found.append(
                Claim(
                    f"fleet-items-hrcs-over-replicate-{gbit}-gbit-{memory}",
                    rounded(value / base),
                    "x",
                    "higher",
                    1.0,
                    title,
                )
            )
        elif placement == "hash" and gbit == GBITS[0]:
            title = f"Requests a second of replicate over hash, {gbit} Gb/s emulated, {memory} memory"
            found.append(
                Claim(
                    f"fleet-items-replicate-over-hash-{gbit}-gbit-{memory}",
                    rounded(base / value),
                    "x",
                    "higher",
                    1.0,
                    title,
                )
            )
    return found


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "fleet_items",
            measure,
            ("jax", "jaxlib", "numpy"),
            (Path(__file__), Path(bat_nodes.__file__)),
        )
    )
