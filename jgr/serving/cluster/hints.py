# SPDX-License-Identifier: Apache-2.0
"""What a router knows of a request: a glance at its body. The replica that gets it reads and checks it whole."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from jgr.serving.api import MAX_DEADLINE_MS
from jgr.serving.cluster.protocol import sent
from jgr.serving.cluster.ways import Stamp
from jgr.serving.http.decoding import UNREADABLE
from jgr.serving.known_items import user_entry
from jgr.serving.policies.shards import profile

WORK = ("/v1/recommend", "/v1/rank", "/v1/rerank", "/v1/score", "/v1/explain/recommend", "/v1/explain/rank")
USERS, PREFILL = "/v1/users/", "/prefill"


class Hint(NamedTuple):
    """user: the name of the user's cache entries, "" for nobody. events: of the history. items: ids of the candidates.
    left_ms: the deadline, from the arrival at the fleet; None: there is none. waited_ms: how long ago that was when it
    was sent, at the moment `sent`. to: the replica that is meant; "": any. sender: the router's name. tried: replicas
    that come last, since they have failed the request or are silent. attempt: the name of this attempt at the request,
    see `attempts.ATTEMPTS`. model, layout: that the request names; "": none. shards: those of the embedding rows that
    the history reads most, see `shards.profile`. expected: replicas that the router may send it to, each with the
    tokens that it should compute; empty: no router has chosen.
    """

    user: str = ""
    events: int = 0
    items: tuple[str, ...] = ()
    left_ms: float | None = None
    waited_ms: float = 0.0
    sent: Stamp = Stamp()
    to: str = ""
    sender: str = ""
    tried: tuple[str, ...] = ()
    attempt: str = ""
    model: str = ""
    layout: str = ""
    shards: tuple[str, ...] = ()
    expected: tuple[tuple[str, int], ...] = ()

    def __reduce__(self) -> Any:
        return sent(self)


class _Glance(Struct):
    """The fields that matter here, of any request; `documents` are the candidates of a rerank."""

    user_id: Any = None
    history: list[msgspec.Raw] = []
    candidates: Any = ()
    documents: Any = ()
    deadline_ms: Any = None
    model: Any = None
    layout: Any = None


_decode = msgspec.json.Decoder(_Glance).decode


def works(path: str) -> bool:
    """Whether a request at this path is for a model's work and says in a field of its body when it must be answered."""
    return path in WORK or (path.startswith(USERS) and path.endswith(PREFILL))


def glance(path: str, body: bytes, tenant: str = "", profiled: bool = False) -> Hint:
    """The hint of a request for a model's work; of one that cannot be read, and of others, an empty one. profiled:
    whether it has the shards that the history reads."""
    if not works(path):
        return Hint()
    try:
        seen = _decode(body)
    except UNREADABLE:
        return Hint()
    user: Any = seen.user_id if path in WORK else unquote(path[len(USERS) : -len(PREFILL)])
    name = user if isinstance(user, str) else str(user) if type(user) is int else ""
    items = seen.candidates or seen.documents
    deadline = seen.deadline_ms
    return Hint(
        user=user_entry(name, tenant),
        events=len(seen.history),
        items=tuple(map(_name, items)) if isinstance(items, list) else (),
        left_ms=float(deadline)
        if type(deadline) in (int, float) and 0 < deadline <= MAX_DEADLINE_MS
        else None,
        model=seen.model if isinstance(seen.model, str) else "",
        layout=seen.layout if isinstance(seen.layout, str) else "",
        shards=profile(seen.history) if profiled else (),
    )


def _name(item: Any) -> str:
    """The id that a candidate is; what is none has no name, and a deep one cannot be written down."""
    return item if isinstance(item, str) else str(item) if type(item) is int else ""
