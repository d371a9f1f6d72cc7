# SPDX-License-Identifier: Apache-2.0
"""One load from several client processes, for rates that one process cannot send.

The one idea: the schedule is dealt out like cards, so that all processes together send exactly what one would have
sent, at the same times: they start at one moment of the machine's monotonic clock, and their results are put back in
order.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from jgr.traffic import open_loop
from jgr.traffic.http_client import Target, Verdict
from jgr.traffic.open_loop import Progress, Results
from jgr.traffic.schedule import LoadError, Schedule

MAX_PROCESSES = 256
START_S = 0.2
"""How long before the first request the processes are told when it is, once all of them are there."""
_READY_S = 120.0  # to start an interpreter on a busy machine, and to render its requests


def run(
    schedule: Schedule,
    target: Target,
    *,
    processes: int,
    max_connections: int,
    timeout_s: float,
    progress: Progress,
) -> Results:
    """Run a schedule from this process, or from `processes` others, each with up to max_connections.

    Raises LoadError if the server cannot be reached, or a process ended before its time.
    """
    processes = min(processes, len(schedule))
    settings: dict[str, Any] = {"max_connections": max_connections, "timeout_s": timeout_s}
    if processes <= 1:
        return open_loop.run(schedule, target, progress=progress, **settings)
    context = multiprocessing.get_context("spawn")
    pipes: list[Pipe] = []
    with ExitStack() as stack:
        for number in range(processes):
            ours, theirs = context.Pipe()
            pipes.append(stack.enter_context(ours))
            child = context.Process(
                target=_client,
                args=(theirs, schedule.part(number, processes), target, settings),
                name=f"load {number}",
                daemon=True,
            )
            child.start()
            theirs.close()
            stack.callback(_end, child)
        _gather(pipes, "ready", _READY_S)
        start_s = time.monotonic() + START_S
        for pipe in pipes:
            pipe.send(start_s)
        return _merge(schedule, _gather(pipes, "results", None, len(schedule), progress))


def _end(child: Any) -> None:
    """End a process that has ended by itself, or whose results nobody wants any more."""
    child.terminate()
    child.join()
    child.close()


def _gather(
    pipes: Sequence[Pipe],
    what: str,
    patience_s: float | None,
    total: int = 0,
    progress: Progress = lambda done, all, label: None,
) -> list[Any]:
    """One message of the kind `what` from each process, in their order; shows the progress that they tell of."""
    found: dict[Pipe, Any] = {}
    answered = dict.fromkeys(pipes, 0)
    until_s = None if patience_s is None else time.monotonic() + patience_s
    while len(found) < len(pipes):
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        ready = wait([pipe for pipe in pipes if pipe not in found], left_s)
        if not ready:
            raise LoadError(f"a client process was not {what} within {patience_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Pipe)
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                raise LoadError("a client process ended before its time") from None
            if kind == "failed":
                raise LoadError(value)
            if kind == "progress":
                answered[pipe] = value
                progress(sum(answered.values()), total, "")
            else:
                assert kind == what
                found[pipe] = value
    return [found[pipe] for pipe in pipes]


def _merge(schedule: Schedule, parts: Sequence[Results]) -> Results:
    verdicts: dict[Verdict, int] = {}
    ended = np.empty(len(schedule), np.int32)
    times = np.empty((4, len(schedule)))
    for number, part in enumerate(parts):
        to = np.array([verdicts.setdefault(verdict, len(verdicts)) for verdict in part.verdicts], np.int32)
        place = slice(number, None, len(parts))
        ended[place] = to[part.ended]
        times[:, place] = part.due_s, part.began_s, part.sent_s, part.end_s
    due_s, began_s, sent_s, end_s = times
    return Results(due_s, began_s, sent_s, end_s, ended, list(verdicts))


def _client(pipe: Pipe, schedule: Schedule, target: Target, settings: dict[str, Any]) -> None:
    """The main function of a client process."""

    def start() -> float:
        pipe.send(("ready", None))
        return float(pipe.recv())

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    with suppress(BrokenPipeError), pipe:
        try:
            results = open_loop.run(
                schedule,
                target,
                progress=lambda done, all, label: pipe.send(("progress", done)),
                start=start,
                **settings,
            )
            pipe.send(("results", results))
        except LoadError as error:
            pipe.send(("failed", str(error)))
