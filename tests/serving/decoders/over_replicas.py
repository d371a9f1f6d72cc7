# SPDX-License-Identifier: Apache-2.0
"""Run by test_data_parallel.py in a process of 8 devices: answers over HTTP of one of them and of several, as JSON."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

from jgr.cache import device_reads  # noqa: E402
from jgr.cache.memory import Memory  # noqa: E402
from jgr.config import Config, ConfigError, override  # noqa: E402
from jgr.models.beam import Filters  # noqa: E402
from jgr.models.decoder import DecoderConfig  # noqa: E402
from jgr.models.replicated import Replicated  # noqa: E402
from jgr.prompt.tokens import semantic_id_tokenizer  # noqa: E402
from jgr.serving.decoders.loading import load_engine  # noqa: E402
from jgr.serving.decoders.row_executor import _parted  # noqa: E402
from jgr.serving.http.listener import Listener  # noqa: E402
from jgr.serving.policies.jobs import Kind  # noqa: E402
from tests.serving.decoders.over_devices import folder, items  # noqa: E402
from tests.serving.fakes import PATIENCE_S, Pending, Reply  # noqa: E402

DEVICES = 8
PLAIN = (
    "model.compilation_cache=", "profiles.tokens=32", "profiles.batch=8", "profiles.widths=4", "profiles.candidates=8",
    "beam.width=4", "prompt.max_items=8", "server.port=0", "server.admin_key=4dm1n",
    "server.max_history=8", "server.max_filter_items=8",
)  # fmt: skip
RANKING = (
    "prompt.template=<bos>{history}<sid>", "rank.method=item_token", "rank.item=<sid>{sid}", "rank.item_span=4",
    "rank.requests=2", "rank.tokens=96", "rank.context=48", "rank.candidates=16", "cache.policy=hotness",
    "cache.device_mb=0.1", "cache.page_kb=1", "data_parallel.hot_share=0.2",
)  # fmt: skip
ADMIN = {"Authorization": "Bearer 4dm1n"}
CLIENTS = 12


class Served:
    """A server over an engine, in a thread of this process. now: a link to the model's folder."""

    def __init__(self, now: Path, kinds: Sequence[Kind], *settings: str) -> None:
        self.config = override(Config(), f"model.path={now}", *PLAIN, *settings)
        self.now, ready = now, threading.Event()
        load = partial(load_engine, self.config, memory=Memory.of(self.config), kinds=kinds)
        self.listener = Listener(load(), self.config, load=load, on_ready=lambda url: ready.set())
        self.port = int(self.listener.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self.listener.serve_until_stopped, daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def stop(self) -> None:
        self.listener.models.check()
        self.listener.stop()
        self._thread.join()
        assert self.listener.exit_code == 0

    def call(self, path: str, body: Any = None, method: str | None = None) -> Reply:
        headers = ADMIN if "reload" in path else {}
        return Pending(self.port, method or ("GET" if body is None else "POST"), path, body, headers).reply()

    def ask(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """Answers of many clients at a time, in the order of the questions."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            replies = list(pool.map(partial(self.call, path), bodies))
        assert {reply.status for reply in replies} == {200}, replies[0].body
        return [reply.json for reply in replies]

    def reload(self, name: str) -> None:
        """Serve another folder's weights."""
        point_to(self.now, name)
        assert self.call("/v1/models/jgr/reload", {}).status == 202
        while self.call("/v1/models").json["data"][0]["reload"] == "running":
            pass
        assert self.call("/v1/models").json["data"][0]["reload"] == "done"

    def metric(self, name: str, label: str = "") -> float:
        lines = self.call("/metrics").body.decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name) and label in x)


KEPT: list[Served] = []
"""Servers that have ended, whose programs later ones find."""


def point_to(now: Path, name: str) -> None:
    """Have the link lead to another folder beside it."""
    aside = now.with_name("next")
    aside.symlink_to(now.with_name(name))
    aside.rename(now)


def questions(seed: int, number: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        user = draw.randrange(9)
        history = [f"i{(7 * user + at) % 30}" for at in range(2 + user % 7)]
        candidates = [f"i{int(30 * draw.random() ** 2)}" for _ in range(8)]
        found.append(
            {"user_id": f"u{user}", "history": history, "candidates": list(dict.fromkeys(candidates))}
        )
    return found


def scores(answers: Sequence[Any]) -> list[list[Any]]:
    """The items by their names, so that ties may change places."""
    return [sorted([item["item_id"], item["score"]] for item in answer["items"]) for answer in answers]


def ranked(place: Path, *settings: str) -> dict[str, Any]:
    """Rankings by many clients at a time, before and after an erasure and a reload."""
    server = Served(place / "now", ("rank",), *RANKING, *settings)
    found, usages = [], []
    for seed in range(4):
        answers = server.ask("/v1/rank", questions(seed, 32))
        found += scores(answers)
        usages += [answer["usage"]["cached_tokens"] for answer in answers]
    erased = [server.call(f"/v1/users/u{user}/cache", method="DELETE").json["entries"] for user in range(9)]
    again = [server.call(f"/v1/users/u{user}/cache", method="DELETE").json["entries"] for user in range(9)]
    found += scores(server.ask("/v1/rank", questions(4, 32)))
    told = {
        "cached": sum(usages),
        "erased": sum(erased),
        "again": sum(again),
        "read": server.metric("jgr_device_item_bytes_total"),
        "sent": server.metric("jgr_device_sent_bytes_total"),
        "copied": server.metric("jgr_cache_events_total", "from_device"),
    }
    server.reload("other")
    for seed in (5, 6):
        found += scores(server.ask("/v1/rank", questions(seed, 32)))
    told["compiled"] = server.metric("jgr_compilations_total", 'phase="request"')
    server.stop()
    KEPT.append(server)
    point_to(place / "now", "first")
    return told | {"scores": found}


def parted(count: int) -> bool:
    """Whether the rows of a batch, with what stands beside them, come together as if one device had them all."""
    rows, filters = np.arange(24).reshape(8, 3), Filters(*np.arange(8 * 20).reshape(5, 8, 2, 2), None)
    weights, tables = np.arange(3.0), np.arange(5)

    def call(weights: Any, tables: Any, rows: Any, filters: Any, *, by: int) -> Any:
        return by * rows @ weights + tables.sum() + sum(each.sum((1, 2)) for each in filters[:5])

    several = Replicated.of(count)
    found = jax.jit(lambda *given: _parted(call, several, *given, by=3))(weights, tables, rows, filters)
    return bool((np.asarray(found) == call(weights, tables, rows, filters, by=3)).all())


def refused(place: Path, *settings: str) -> str:
    """What is said of settings that cannot be served."""
    try:
        load_engine(override(Config(), f"model.path={place / 'now'}", *PLAIN, *settings))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    device_reads.LARGEST = device_reads.SMALLEST  # fewer programs of copies
    place, catalog = Path(sys.argv[1]), items(1)
    cfg = DecoderConfig(
        family="qwen3", vocab_size=semantic_id_tokenizer(catalog).vocab_size, hidden=16, layers=1, heads=2, kv_heads=1,
        head_dim=8, mlp=24, rope_theta=1e4, norm_eps=1e-6, tied=True, max_position=128,
    )  # fmt: skip
    for seed, name in enumerate(("first", "other")):
        folder(place / name, cfg, catalog, exported=False, seed=seed)
    point_to(place / "now", "first")
    several = f"data_parallel.devices={DEVICES}"
    print(
        json.dumps(
            {
                "one": ranked(place),
                "copies": ranked(place, several, "data_parallel.reads=copies"),
                "all_to_all": ranked(place, several, "data_parallel.reads=all_to_all"),
                "refused": [
                    refused(place, several, "profiles.batch=4"),
                    refused(place, several, *RANKING, "cache.host_mb=1"),
                    refused(place, several, *RANKING, "server.journal=journal.jsonl"),
                ],
                "parted": parted(DEVICES),
            }
        )
    )
