# SPDX-License-Identifier: Apache-2.0
"""A fleet whose scorer reads items' features from Redis, which can be killed: every answer is checked item by item.

Nothing of the features is kept in the replicas, so that each request asks the store. What Redis does not give in time
is scored without features, and the answer counts it: so many items, and no others, must have the score that one engine
without a store gives them, and the others that of one with the same features in a file.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import jgr
from benchmarks import flame_serving, pda_world
from benchmarks.fault_world import MAX_APART, SETTINGS, Call, Fleet, until
from benchmarks.harness import Missing
from benchmarks.hostile_world import scores
from jgr.config import load_config
from jgr.features.addresses import open_store

ITEMS, EVENTS, CANDIDATES = 200, 16, 8
PORT_S = 10.0
DOWN_S = 6.0
"""So long Redis is gone."""


class Featured:
    """A model's folder, its configuration and its Redis server. files: as `fault_world.Fleet` takes them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._socket = folder, folder / "redis.sock"
        self._redis: subprocess.Popen[bytes] | None = None
        flame_serving.save(folder / "climber", replace(pda_world.MODEL, n_items=ITEMS, max_items=EVENTS))
        given = [
            "model.name=jgr", f"model.path={folder / 'climber'}", "executors.sizes=8", "server.port=0",
            f"model.compilation_cache={folder / 'compiled'}", f"features.store=unix://{self._socket}",
            "features.cache_mb=0", "features.max_wait_ms=500", *SETTINGS,
        ]  # fmt: skip
        self.files = [folder / "featured.py"]
        self.files[0].write_text(
            "from jgr.config import Config, override\n\n\ndef get_config():\n"
            f"    return override(Config(), *{given!r})\n"
        )

    def __enter__(self) -> Featured:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Redis, with the features of all items."""
        command = [pda_world.redis_program(), "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        self._redis = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self._folder)
        if until(self._socket.exists, PORT_S) is None:
            raise Missing("redis-server did not start")
        self._fill(f"unix://{self._socket}")

    def kill(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None
            self._socket.unlink(missing_ok=True)

    def gone_and_back(self, fleet: Fleet) -> Any:
        """Kill Redis and start it again; gives what tells whether answers have all features again."""
        self.kill()
        time.sleep(DOWN_S)
        self.start()
        body = msgspec.json.encode(drawn(random.Random(0))[1])

        def whole() -> bool:
            answers = [fleet.ask("POST", "/v1/rank", body) for _ in range(10)]
            return all(status == 200 and not found["usage"]["feature_missing"] for status, found in answers)

        return whole

    def reference(self) -> FeaturedReference:
        file = f"{self._folder / 'features.sqlite'}"
        self._fill(file)
        return FeaturedReference(self.files[0], file)

    def _fill(self, address: str) -> None:
        store = open_store(address, PORT_S, create=True)
        pda_world.fill(store, ITEMS)
        store.close()


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request: path and body."""
    history = [str(rng.randrange(ITEMS)) for _ in range(rng.randint(1, EVENTS))]
    return "/v1/rank", {
        "history": history,
        "candidates": [str(row) for row in rng.sample(range(ITEMS), CANDIDATES)],
        "user_id": f"u{rng.randrange(40)}",
    }


class FeaturedReference:
    """One engine with all features, and one without any."""

    def __init__(self, file: Path, store: str) -> None:
        config, self._engines = load_config(file), ExitStack()
        every = ["features.max_wait_ms=60000", "features.timeout_ms=60000"]
        self._with, self._without = (
            self._engines.enter_context(jgr.Engine(config, [f"features.store={address}", *every]))
            for address in (store, "")
        )
        self.without_features = 0

    def close(self) -> None:
        self._engines.close()

    def wrong(self, calls: Sequence[Call]) -> list[str]:
        """The answers that are others than they say: the first lines of each."""
        found = []
        for call in calls:
            if call.outcome not in ("ok", "late") or "items" not in call.answer:
                continue
            whole, bare = (_scores(engine, call.body) for engine in (self._with, self._without))
            got, missing = scores(call.answer), call.answer["usage"]["feature_missing"]
            self.without_features += bool(missing)
            as_whole, as_bare = (
                {item for item in got if abs(got[item] - expected[item]) <= MAX_APART}
                for expected in (whole, bare)
            )
            if got.keys() != whole.keys() or as_whole | as_bare != got.keys():
                found.append(f"an item has another score: {call.body} {got}")
            elif len(got) - len(as_whole) > missing or len(got) - len(as_bare) > len(got) - missing:
                found.append(f"{missing} items are said to lack features: {call.body} {got}")
        return found


def _scores(engine: jgr.Engine, body: Mapping[str, Any]) -> dict[str, float]:
    leave = ("deadline_ms", "user_id")
    answer = engine.rank(**{name: value for name, value in body.items() if name not in leave})
    return {item.item_id: item.score for item in answer.items}
