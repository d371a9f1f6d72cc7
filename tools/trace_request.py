# SPDX-License-Identifier: Apache-2.0
"""Counts the files of jgr/ that one warm request enters, and how often it moves from one to another.

    python -m tools.trace_request [--route] [--recommend_files=14 --recommend_moves=50 --rank_files=14 --rank_moves=60]

Two requests go through the HTTP application and the real engine, in this process: a recommend of a small random decoder
for the 2 best items, and a rank of 2 candidates by a small random scorer that has kept the user. Each is answered
several times before, so that nothing is compiled and the user is kept; then several times under a profiler, and the
answer with the fewest moves counts, since threads that wake in another order only add some.

A *file* is entered where a function of it is called. A *move* is a call of a Python function, or a return from one
(a coroutine that is resumed or waits counts as both), in another file than the last such event of the same thread.
Events outside of jgr/ are left out, so that a callback by way of asyncio is a move from jgr/ to jgr/. Work that the
XLA runtime does is not Python and does not count. A limit that is exceeded is exit code 1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import msgspec
from absl import app, flags

import jgr
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, TrainConfig, override
from jgr.models import checkpoint, decoder, params, scorers
from jgr.models.hstu import HstuConfig
from jgr.models.retrievers import items_digest
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.serving.http.server import App
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.loading import load_any
from jgr.serving.versions.served_models import Models
from jgr.training.generator import decoder_config

PACKAGE = Path(jgr.__file__).parent
DOOR = "serving/http/server.py"
N_ITEMS = 16
WARM, TRACED = 4, 20
"""Answers before the profiler is on, and under it."""
HISTORY = ["i1", "i2", "i3"]
BODIES = {
    "recommend": {"history": HISTORY, "top_k": 2},
    "rank": {"history": HISTORY, "candidates": ["i4", "i5"], "user_id": "u"},
}


class Event(NamedTuple):
    """A call ("call") or return ("return") of a function. file: its path below jgr/."""

    thread: str
    kind: str
    file: str
    function: str


class Trace(NamedTuple):
    """The events of one request, in the order in which they came, whatever the thread."""

    events: tuple[Event, ...]

    @property
    def files(self) -> list[str]:
        return sorted({event.file for event in self.events if event.kind == "call"})

    @property
    def moves(self) -> list[tuple[Event, Event]]:
        """The events before and after each move."""
        last: dict[str, Event] = {}
        found = []
        for event in self.events:
            before = last.get(event.thread, event)
            if before.file != event.file:
                found.append((before, event))
            last[event.thread] = event
        return found


class Profiler:
    """Collects events of all threads that start while it is installed, and of this one, while `recording`."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._recording = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._events, self._recording = [], True
        try:
            yield
        finally:
            self._recording = False

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self._events))

    def _see(self, frame: FrameType, kind: str, argument: object) -> None:
        if not self._recording or kind not in ("call", "return"):
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            file = path.relative_to(PACKAGE).as_posix()
            thread = threading.current_thread().name
            self._events.append(Event(thread, kind, file, frame.f_code.co_qualname))


def decoder_folder(folder: Path) -> Config:
    """A decoder with random weights over N_ITEMS items, and the configuration that serves it."""
    train = TrainConfig(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, mlp=64)
    catalog = _catalog([(f"<a_{row % 4}>", f"<b_{row // 4}>") for row in range(N_ITEMS)])
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = decoder_config(train, tokenizer.vocab_size, 64)

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, params.initialize(decoder.spec(cfg), jax.random.key(0)), write_beside)
    sizes = ("profiles.batch=1", "profiles.tokens=16", "profiles.widths=4", "profiles.candidates=4")
    return _config(folder, "prompt.max_items=4", "beam.width=4", *sizes)


def scorer_folder(folder: Path) -> Config:
    """A scorer (HSTU) with random weights that keeps its users, and the configuration that serves it."""
    catalog = _catalog([(f"<a_{row}>",) for row in range(N_ITEMS)])
    cfg = HstuConfig(
        n_items=N_ITEMS, max_items=6, hidden=8, layers=2, heads=2, qk_dim=4, v_dim=4, length=17,
        items=items_digest(catalog.item_ids),
    )  # fmt: skip
    drawn = params.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))
    scorers.save(folder, cfg, drawn, lambda folder: save_catalog(catalog, folder / "catalog.jsonl"))
    kept = ("executors.share_user=cache", "cache.device_mb=0.1")
    return _config(folder, "executors.sizes=4", "executors.streams=1", *kept)


def _catalog(symbols: Sequence[tuple[str, ...]]) -> Catalog:
    return Catalog.build([f"i{row}" for row in range(N_ITEMS)], symbols, [{}] * N_ITEMS)


def _config(folder: Path, *settings: str) -> Config:
    return override(Config(), f"model.path={folder}", "model.compilation_cache=", *settings)


async def ask(application: App, kind: str) -> Any:
    """The answer to the request of this kind, by ASGI as a server would ask; RuntimeError where it is refused."""
    body, ended = msgspec.json.encode(BODIES[kind]), asyncio.Event()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if not incoming:
            await ended.wait()
        return incoming.pop() if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await application({"type": "http", "method": "POST", "path": f"/v1/{kind}", "headers": []}, receive, send)
    ended.set()
    await asyncio.sleep(0)  # the watcher of the client hears it
    if sent[0]["status"] != 200:
        raise RuntimeError(f"{kind}: {sent}")
    return msgspec.json.decode(sent[-1]["body"])


async def trace(kind: str, config: Config, profiler: Profiler) -> Trace:
    """The trace of a warm request; threads that the engine starts must see the profiler installed."""
    engine = load_any(config)
    await engine.start()
    application = App(Models([Deployment(engine, config.catalog)]), config.server)
    traces = []
    try:
        for number in range(WARM + TRACED):
            if number < WARM:
                answer = await ask(application, kind)
                continue
            with profiler.recording():
                answer = await ask(application, kind)
            # A lane may still return from the answer before.
            traces.append(Trace(tuple(dropwhile(lambda event: event.file != DOOR, profiler.trace.events))))
    finally:
        await engine.drain(None)
    assert len(answer["items"]) == 2 and (kind == "recommend" or answer["usage"]["cached_tokens"] > 0)
    return min(traces, key=lambda trace: len(trace.moves))


def trace_all(folder: Path) -> dict[str, Trace]:
    """The traces of both requests, by kind. folder: an empty one, for the models."""
    make: dict[str, Callable[[Path], Config]] = {"recommend": decoder_folder, "rank": scorer_folder}
    configs = {kind: made(folder / kind) for kind, made in make.items()}
    profiler = Profiler()
    with profiler.installed():
        return {kind: asyncio.run(trace(kind, config, profiler)) for kind, config in configs.items()}


def route(found: Trace) -> str:
    """The moves in order, one a line: the thread, the file and function that is moved to."""
    lines = []
    for _, event in found.moves:
        arrow = "->" if event.kind == "call" else "<-"
        lines.append(f"  {event.thread:<24} {arrow} {event.file}: {event.function}")
    return "\n".join(lines)


def exceeded(traces: Mapping[str, Trace], limits: Mapping[str, int | None]) -> list[str]:
    """What is above its limit, in words. limits: by kind and count, such as "rank_files"; None for no limit."""
    found = []
    for kind, traced in traces.items():
        for what, count in (("files", len(traced.files)), ("moves", len(traced.moves))):
            limit = limits.get(f"{kind}_{what}")
            if limit is not None and count > limit:
                found.append(f"{kind}: {count} {what}, more than {limit}")
    return found


def main(argv: Sequence[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        traces = trace_all(Path(folder))
    for kind, traced in traces.items():
        print(f"{kind}: enters {len(traced.files)} files, moves {len(traced.moves)} times")
        print("\n".join(f"  {file}" for file in traced.files))
        if flags.FLAGS.route:
            print(route(traced))
    too_many = exceeded(traces, flags.FLAGS.flag_values_dict())
    if too_many:
        sys.exit("trace_request: " + "; ".join(too_many))


if __name__ == "__main__":
    flags.DEFINE_bool("route", False, "print every move, too")
    for _kind in BODIES:
        for _what in ("files", "moves"):
            flags.DEFINE_integer(
                f"{_kind}_{_what}", None, f"the most {_what} of a {_kind}; default: no limit"
            )
    app.run(main)
