# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fleet send each other, so that two versions of jgr understand each other or say why not.

A message goes as a plain tuple that begins with the sender's protocol and version, and becomes the receiver's own type
there: no class of the one is needed by the other, and a message of another protocol is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import jgr
from jgr.serving.errors import RequestError

PROTOCOL = 6
"""Counts on with every change of what is sent: a field of a message, a method's arguments, what an answer means."""

T = TypeVar("T")


class Spoken(NamedTuple):
    """What a process speaks. jgr: its version, for people."""

    protocol: int
    jgr: str


class Incompatible(RequestError):
    """Two processes of a fleet do not speak the same protocol."""


def spoken() -> Spoken:
    """What this process speaks."""
    return Spoken(PROTOCOL, jgr.__version__)


def sent(fields: Iterable[Any]) -> tuple[type, tuple[tuple[Any, ...]]]:
    """What a message's `__reduce__` gives: a plain tuple."""
    return tuple, ((*spoken(), *fields),)


def received(kind: type[T], message: Any) -> T:
    """The message as it was sent. Raises Incompatible where the sender speaks another protocol."""
    if isinstance(message, kind):  # it has not left this process
        return message
    protocol, version, *fields = message
    require(Spoken(protocol, version))
    return kind(*fields)


def require(theirs: Iterable[Any]) -> None:
    """Raise Incompatible where they speak another protocol than this process."""
    mine, other = spoken(), Spoken(*tuple(theirs)[:2])
    if mine.protocol != other.protocol:
        raise Incompatible(
            "unavailable",
            f"jgr {other.jgr} of another process of the fleet speaks protocol {other.protocol}, jgr {mine.jgr} here "
            f"{mine.protocol}: they cannot serve together; deploy one version everywhere",
        )
