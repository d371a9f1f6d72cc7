# SPDX-License-Identifier: Apache-2.0
"""What a fleet says of itself, made of what its replicas say."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from jgr.serving.api import Erased, Health, ModelList
from jgr.serving.cluster.relay import Answered, Asked, Headers
from jgr.serving.engine.metrics import CONTENT_TYPE
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import ReplicaInfo, Rollout

NODE = "replica"
"""The label of each series: the replica that it is of."""
SCRAPED_BY = (b"authorization", b"accept", b"accept-encoding")
"""The headers that may change what a scrape answers."""


class Shared:
    """Answers that all get who ask alike while one is being made: a scrape reads every replica."""

    def __init__(self) -> None:
        self._making: dict[Hashable, asyncio.Task[Answered]] = {}

    async def answer(self, alike: Hashable, make: Callable[[], Coroutine[Any, Any, Answered]]) -> Answered:
        """The answer that is being made for who asks so, or else that of `make`. Raises what making it raises; a caller
        who leaves ends nothing for the others."""
        task = self._making.get(alike)
        if task is None:
            # In a context of its own: Ray takes all calls in the context of a request for that request's.
            task = asyncio.create_task(make(), context=contextvars.Context())
            self._making[alike] = task
            task.add_done_callback(lambda done: self._made(alike, done))
        return await asyncio.shield(task)

    def _made(self, alike: Hashable, done: asyncio.Task[Answered]) -> None:
        del self._making[alike]
        if not done.cancelled():
            done.exception()  # where all who waited have left, nobody is told of it


def scraped_by(asked: Asked) -> Hashable:
    """What scrapes that are answered alike have in common: names of headers with their values, or a value of one would
    count as another's."""
    return asked.method, *(header for header in asked.headers if header[0] in SCRAPED_BY)


class _Found:
    """Families of series as a registry takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(texts: Mapping[str, str]) -> bytes:
    """The series of each replica, by its name, as one text; each has the replica as a label more."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [
                sample._replace(labels={**sample.labels, NODE: name}) for sample in family.samples
            ]
    return _rendered(families)


def together(texts: Iterable[str]) -> bytes:
    """The series of several processes, which differ in their labels, as one text."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            found = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found.samples += family.samples
    return _rendered(families)


def _rendered(families: Mapping[str, Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Found(families.values()))
    return generate_latest(registry)


def metrics(told: Mapping[str, Answered], fronts: Sequence[str] = ()) -> Answered:
    """/metrics of the fleet, of what each replica answers, by its name, which decides who may ask; see `best`. fronts:
    the fronts' own series, which have their labels."""
    first = best(list(told.values()))
    if first.status != 200:
        return first
    texts = {name: each.body.decode() for name, each in told.items() if each.status == 200}
    body = merged(texts) + together(fronts)
    return Answered(200, _headers(first, body, CONTENT_TYPE), body)


def best(found: Sequence[Answered]) -> Answered:
    """What stands for the fleet where several replicas were asked: an answer, else a refusal. Raises RequestError where
    none has said anything."""
    if not found:
        raise RequestError("unavailable", "no replica answers")
    return next((each for each in found if each.status == 200), found[0])


def readiness(found: Sequence[Answered], wanted: int) -> Answered:
    """/health/ready of the fleet, which serves where one replica does; see `best` where none does. found: what those
    have said that answered soon. wanted: how many there should be."""
    first, ready = best(found), sum(each.status == 200 for each in found)
    if not ready:
        return first
    body = msgspec.json.encode(Health(status="ready", replicas=ready, of=wanted))
    return Answered(200, _headers(first, body, "application/json"), body)


def models(
    first: Answered, about: Sequence[Mapping[str, Any]], last: Mapping[str, Any] | None, wanted: int
) -> Answered:
    """/v1/models of the fleet: what one replica says, which versions each serves, and how the last change went. last:
    a `Rollout`; None: nobody knows. wanted: how many replicas there should be."""
    if first.status != 200:
        return first
    whole = ModelList(
        data=msgspec.json.decode(first.body, type=ModelList).data,
        replicas=[msgspec.convert(each["info"], ReplicaInfo) for each in about],
        of=wanted,
        rollout=None if last is None else msgspec.convert(last, Rollout),
    )
    body = msgspec.json.encode(whole)
    return Answered(200, _headers(first, body, "application/json"), body)


def erased(found: Sequence[Answered | Exception]) -> Answered:
    """The answer to an erasure, which every replica must have done. Raises RequestError where one has not. A replica
    says 404 where it has nothing of a client that it does not know: others may have had something."""
    answers = [each for each in found if isinstance(each, Answered)]
    refused = next((each for each in answers if each.status not in (200, 404)), None)
    if refused is not None:
        return refused
    if len(answers) < max(1, len(found)):
        lost = len(found) - len(answers)
        raise RequestError("unavailable", f"{lost} of {len(found)} replicas did not answer; ask again")
    done = [each for each in answers if each.status == 200]
    if not done:
        return answers[0]
    entries = sum(msgspec.json.decode(each.body, type=Erased).entries for each in done)
    body = msgspec.json.encode(Erased(entries=entries))
    return Answered(200, _headers(done[0], body, "application/json"), body)


def _headers(first: Answered, body: bytes, content_type: str) -> Headers:
    own = {b"content-type": content_type.encode(), b"content-length": b"%d" % len(body)}
    return [*((name, value) for name, value in first.headers if name.lower() not in own), *own.items()]
