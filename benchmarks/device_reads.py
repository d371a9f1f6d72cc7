# SPDX-License-Identifier: Apache-2.0
"""Items that the 8 devices of one server read of each other, in both ways, beside computing them: through `jgr serve`.

Four servers on the loopback have the same decoder of random weights (4 layers of 64): one has one device, the others
have 8 virtual devices each (`data_parallel.devices`), which copy kept items from device to device, by one all_to_all,
or not at all (`data_parallel.reads`). All are asked the same rankings by as many clients, in turns; of the items, which
are asked for as 1 / rank, each pool holds a part, and so does each device. Every answer is compared with the one
device's.

What is counted does not depend on the machine: bytes that devices read of each other and bytes that went between them
with padding, items copied, tokens computed for an answer. Answers a second are those of virtual devices that share two
cores and whose links are their memory. They compare what the ways cost the host, claim nothing of GPUs, and choose
neither way.

    python -m benchmarks.device_reads [--quick]
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderConfig
from jgr.prompt.tokens import semantic_id_tokenizer

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
DEVICES, CLIENTS, ROUNDS = 8, 32, 5
N_ITEMS, N_USERS, CANDIDATES, HISTORY = 1000, 300, 24, 12
SETTINGS = (
    "model.compilation_cache=", "server.port=0", "prompt.template=<bos>{history}<sid>", "prompt.max_items=16",
    "rank.method=item_token", "rank.item=<sid>{sid}<sid>{sid}<sid>{sid}", "rank.item_span=8", "rank.requests=4",
    "rank.tokens=768", "rank.context=768", "rank.candidates=96", "cache.policy=item", "profiles.batch=8",
    "profiles.tokens=32", "profiles.widths=4", "profiles.candidates=8", "beam.width=4", "cache.new_tokens=64",
)  # fmt: skip
WAYS = ("one_device", "copies", "all_to_all", "compute")


class Asked(NamedTuple):
    """Answers of one round: seconds for all, the scores of each by item, and the sum of computed tokens."""

    seconds: float
    scores: list[dict[str, float]]
    computed: int


def make_folder(folder: Path) -> None:
    """A model folder over N_ITEMS items of one token each."""
    catalog = Catalog.build(
        [f"i{n}" for n in range(N_ITEMS)], [[f"<a_{n}>"] for n in range(N_ITEMS)], [{}] * N_ITEMS
    )
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = DecoderConfig(
        family="qwen3", vocab_size=tokenizer.vocab_size, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, mlp=128,
        rope_theta=1e4, norm_eps=1e-6, tied=True, max_position=1024,
    )  # fmt: skip
    drawn = jax.tree.map(lambda x: 3 * np.asarray(x), params.initialize(decoder.spec(cfg), jax.random.key(0)))

    def write_beside(path: Path) -> None:
        tokenizer.save(path / "tokenizer.json")
        save_catalog(catalog, path / "catalog.jsonl")

    checkpoint.save(folder, cfg, drawn, write_beside)


@contextmanager
def served(folder: Path, way: str, device_mb: float) -> Iterator[int]:
    """A server of its own process: its port."""
    settings = [*SETTINGS, f"model.path={folder}", f"cache.device_mb={device_mb}"]
    environment = {**os.environ, "PYTHONPATH": str(harness.ROOT), "JAX_PLATFORMS": "cpu"}
    if way != "one_device":
        settings += [f"data_parallel.devices={DEVICES}", f"data_parallel.reads={way}"]
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    flags = [f"--set={setting}" for setting in settings]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "serve", *flags, "--log_level=warning"],
        cwd=harness.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"{way}: the server did not start")
            yield int(url.rpartition(":")[2])
        finally:
            process.terminate()


def questions(seed: int, number: int) -> list[dict[str, Any]]:
    """Rankings of items that are asked for as 1 / rank, for users of whom all are alike."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, N_ITEMS + 1)
    found = []
    for _ in range(number):
        user = int(rng.integers(N_USERS))
        history = [f"i{n}" for n in np.random.default_rng(user).integers(0, N_ITEMS, HISTORY)]
        items = rng.choice(N_ITEMS, CANDIDATES, replace=False, p=share / share.sum())
        found.append({"user_id": f"u{user}", "history": history, "candidates": [f"i{n}" for n in items]})
    return found


def ask(port: int, body: Mapping[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/rank", json.dumps(body))
    response = connection.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"a ranking was answered with {response.status}: {answer}")
    return answer


def ask_all(port: int, bodies: Sequence[Mapping[str, Any]]) -> Asked:
    """All the questions, by CLIENTS at a time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        start = time.perf_counter()
        answers = list(pool.map(partial(ask, port), bodies))
        seconds = time.perf_counter() - start
    scores = [{item["item_id"]: item["score"] for item in answer["items"]} for answer in answers]
    return Asked(seconds, scores, sum(answer["usage"]["computed_tokens"] for answer in answers))


def series(port: int, name: str, label: str = "") -> float:
    """The sum of a metric's series."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name) and label in x)


def farthest(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> float:
    """The largest difference of two scores of an item."""
    return max(
        abs(one[item] - other[item]) for one, other in zip(found, expected, strict=True) for item in other
    )


def measure_pool(folder: Path, device_mb: float, number: int, rounds: int, quiet: Quiet) -> Row:
    """All ways with one size of the pools, each asked the same in each round."""
    with ExitStack() as stack:
        ports = {way: stack.enter_context(served(folder, way, device_mb)) for way in WAYS}
        turns = dict.fromkeys(WAYS, 0)

        def turn(way: str) -> Asked:
            turns[way] += 1
            return ask_all(ports[way], questions(turns[way], number))

        runs = harness.interleave({way: partial(turn, way) for way in WAYS}, rounds, quiet)
        if len(set(turns.values())) > 1:
            raise AssertionError("the ways were asked different questions")
        drift = {
            way: max(
                farthest(run.scores, one.scores)
                for run, one in zip(runs[way], runs["one_device"], strict=True)
            )
            for way in WAYS[1:]
        }
        answers = sum(turns.values()) // len(WAYS) * number
        row: Row = {
            "device_mb": device_mb,
            "farthest_from_one_device": {way: float(value) for way, value in drift.items()},
            "computed_tokens_an_answer": {
                way: rounded(sum(run.computed for run in runs[way]) / (len(runs[way]) * number))
                for way in WAYS
            },
            "answers_per_s": {
                way: harness.spread(number / run.seconds for run in found) for way, found in runs.items()
            },
            "seconds": {way: [run.seconds for run in found] for way, found in runs.items()},
        }
        for way in ("copies", "all_to_all"):
            read = series(ports[way], "jgr_device_item_bytes_total")
            sent = series(ports[way], "jgr_device_sent_bytes_total")
            copied = series(ports[way], "jgr_cache_events_total", "from_device")
            row[way] = {
                "read_bytes_an_answer": rounded(read / answers),
                "sent_bytes_an_answer": rounded(sent / answers),
                "copied_items_an_answer": rounded(copied / answers),
            }
    return row


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = []
    for row in rows:
        tokens, size = row["computed_tokens_an_answer"], f"{row['device_mb']:g}-mb"
        pools = f"pools of {row['device_mb']:g} MB"
        for way, words in (
            ("copies", "copied from device to device"),
            ("all_to_all", "by one all_to_all"),
        ):
            name = way.replace("_", "-")
            far = row["farthest_from_one_device"][way]
            found += [
                Claim(
                    f"device-reads-farthest-{name}-{size}", far, "", "lower", 1e-4,
                    f"Largest difference of a score from one device's, items {words} between 8, {pools}",
                ),
                Claim(
                    f"device-reads-computed-{name}-{size}",
                    rounded(tokens[way] / tokens["compute"]), "x", "lower", 1.0,
                    f"Tokens computed for an answer, items {words} between 8, over none copied; {pools}",
                ),
            ]  # fmt: skip
    return found


def measure(quick: bool, quiet: Quiet) -> Measured:
    number, rounds, sizes = (32, 1, (2.0,)) if quick else (192, ROUNDS, (1.0, 4.0))
    with tempfile.TemporaryDirectory(prefix="jgr-device-reads-") as folder:
        make_folder(Path(folder) / "model")
        rows = [measure_pool(Path(folder) / "model", mb, number, rounds, quiet) for mb in sizes]
    return Measured(claims(rows), rows)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="device_reads",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
        )
    )
