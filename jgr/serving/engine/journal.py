# SPDX-License-Identifier: Apache-2.0
"""A journal of what the policies were told and what they answered, one JSON line a call (`server.journal`).

The one idea: policies are pure, so a journal replayed into fresh policies gives the same plans, byte for byte. That is
how a server's day is examined, and how it is shown that live and simulated policies are the same (DESIGN idea 6).

A line has the policy's number, the time in ns, the event, and its result; the first line of a policy opens it, with
its name. Lines of all engines of a process stand in one file, in the order of the calls, since their policies may share
a pool. A journal holds what requests say of users: treat it as the requests themselves.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import functools
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from jgr.config import ConfigError
from jgr.files import reading
from jgr.serving.policies import events
from jgr.serving.policies.jobs import Job, Outcome
from jgr.serving.policies.live import Span
from jgr.serving.policies.policy import Policy


class Opened(Struct, frozen=True, tag="open"):
    """A policy begins. name: the version of its model, and that of its catalog. measured: what runs take, as the
    engine's `Served.measured` says."""

    name: str
    measured: msgspec.Raw = msgspec.Raw(b"null")


class Closed(Struct, frozen=True, tag="close"):
    """A policy's engine has ended, and gave back what it held of the pool."""


class Line(Struct, frozen=True):
    """One call. result: what the policy answered, as JSON."""

    policy: int
    now_ns: int
    event: Opened | Closed | events.Event
    result: msgspec.Raw = msgspec.Raw(b"null")


_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class Journal:
    """Writes to a file that only its owner reads. Belongs to one event loop. ConfigError where it cannot be opened.

    A file that is there becomes PATH.old, so that a restart does not take the journal of what led to it. A write that
    fails, as where the disk is full, ends the journal and not the serving: the log tells of it once.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = _append(path)
            if self._file.tell():
                path.replace(f"{path}.old")
                self._file.close()
                self._file = _append(path)
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            raise ConfigError(f"server.journal: {path}: {getattr(error, 'strerror', error)}") from None
        self._numbers = itertools.count()
        self._open: dict[int, int] = {}

    def follow(self, name: str, measured: Any, policy: Policy[Any], now_ns: int) -> Policy[Any]:
        """Write every call of a policy from now on. Returns the policy to call in its place. name, measured: see
        Opened."""
        followed = _Followed(self, next(self._numbers), policy)
        self._open[id(followed)] = followed.number
        self.write(Line(followed.number, now_ns, Opened(name, msgspec.Raw(_encode(measured)))))
        return cast(Policy[Any], followed)

    def end(self, policy: Policy[Any], now_ns: int) -> None:
        """The policy's engine has ended. Nothing is written of a policy that is not followed, or twice of one."""
        number = self._open.pop(id(policy), None)
        if number is not None:
            self.write(Line(number, now_ns, Closed()))

    def write(self, line: Line) -> None:
        if self._file.closed:
            return
        text = _encode(line) + b"\n"
        try:
            whole = self._file.write(text) == len(text)
            cause = "only a part of a line was written"
        except OSError as error:
            whole, cause = False, str(error)
        if not whole:  # a later line would follow a gap, which cannot be replayed
            _log.error("server.journal: %s ends here: %s", self._file.name, cause)
            self.close()

    def close(self) -> None:
        """Nothing more is written. A second call does nothing."""
        self._file.close()


def of_replica(path: str, replica: str) -> str:
    """The file of one replica of a fleet: journal.jsonl becomes journal.REPLICA.jsonl; "" stays "", for none."""
    if not path:
        return ""
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}.{replica}{whole.suffix}"))


@functools.cache
def journal_at(path: str) -> Journal:
    """The one journal of this process at a path. It is closed when the process ends."""
    journal = Journal(Path(path))
    atexit.register(journal.close)
    return journal


def _append(path: Path) -> io.FileIO:
    """Open a file for this process alone, as long as it is open. OSError where that cannot be."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for its reader
        raise OSError(errno.EINVAL, "it must be a file")
    file = io.FileIO(path, "a", opener=functools.partial(os.open, mode=0o600))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OSError(errno.EBUSY, "another server writes to it") from None
    return file


class _Followed:
    """A policy whose calls are written down; all else that is asked of it, it answers itself."""

    def __init__(self, journal: Journal, number: int, policy: Policy[Any]) -> None:
        self.number, self._journal, self._policy = number, journal, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _apply(self, event: events.Event, now_ns: int) -> Any:
        result = event.apply(self._policy, now_ns)
        self._write(event, now_ns, result)
        return result

    def _write(self, event: events.Event, now_ns: int, result: Any) -> None:
        self._journal.write(Line(self.number, now_ns, event, msgspec.Raw(_encode(result))))

    def submit(self, job: Job, now_ns: int) -> Any:
        return self._apply(events.Submitted(job), now_ns)

    def refuses(self, job: Job, now_ns: int) -> Any:
        result = self._policy.refuses(job, now_ns)
        if result is not None:  # else nothing has changed, and the request is submitted
            self._write(events.Foretold(job), now_ns, result)
        return result

    def cancel(self, job_id: int, now_ns: int) -> Any:
        return self._apply(events.Cancelled(job_id), now_ns)

    def ready(self, job_id: int, now_ns: int) -> Any:
        return self._apply(events.Readied(job_id), now_ns)

    def plan(self, now_ns: int) -> Any:
        return self._apply(events.Planned(), now_ns)

    def commit(self, run: int, outcome: Outcome, now_ns: int, span: Span | None = None) -> Any:
        return self._apply(events.Committed(run, outcome, span), now_ns)

    def renew(self, epoch: int, now_ns: int) -> Any:
        return self._apply(events.Renewed(epoch), now_ns)

    def forget(self, user: str, now_ns: int) -> Any:
        return self._apply(events.Forgot(user), now_ns)

    def shadow(self, now_ns: int) -> Any:
        return self._apply(events.Shadowed(), now_ns)

    def drain(self, now_ns: int) -> Any:
        return self._apply(events.Drained(), now_ns)


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal. ConfigError names one that is damaged; a last line that was cut off is left out."""
    with reading(path, ConfigError) as file:
        for number, text in enumerate(file, 1):
            try:
                yield _decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if text.endswith(b"\n"):
                    raise ConfigError(f"{path}, line {number}: {error}") from None


def replay(
    lines: Iterable[Line], make: Callable[[int, Opened], Policy[Any]], end: Callable[[int], None]
) -> Iterator[tuple[Line, bytes]]:
    """Make every call of a journal once more. Yields each call's line, and the JSON of its result now.

    make: makes a fresh policy, given its number and how it was opened. end: gives back what the policy of a number held
    of the pool.
    """
    policies: dict[int, Policy[Any]] = {}
    for line in lines:
        if isinstance(line.event, Opened):
            policies[line.policy] = make(line.policy, line.event)
        elif isinstance(line.event, Closed):
            end(line.policy)
        else:
            yield line, _encode(line.event.apply(policies[line.policy], line.now_ns))
