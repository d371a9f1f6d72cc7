# SPDX-License-Identifier: Apache-2.0
"""Reads the bodies of requests, within a bound for each and one for all that come in parts.

What has come of a body that is not whole yet stays in memory until the rest comes or its time is up, so a client with
many connections could have the server hold very much. A body that comes whole is never counted.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive

from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import RequestError

DISCARD_BODIES = 8
"""Too large a body is read and discarded up to this many times the limit, so that the client gets the 413."""
MAX_BODIES_BYTES = 256 << 20
"""What all bodies together may hold that have come in part; of one that brings more, all is dropped."""


class Bodies:
    """most: bytes of a body. refused: called when a body is refused for what all hold.

    held: bytes of bodies that have come in part. peak: the most since it was set.
    """

    def __init__(self, most: int, refused: Callable[[], object]) -> None:
        self._most, self._refused = most, refused
        self.held = self.peak = 0

    async def read(self, receive: Receive) -> bytes:
        """Read the whole body. Raises RequestError if it exceeds the limit, or all bodies theirs; ClientGone if the
        client leaves."""
        chunks: list[bytes] = []
        received, held, more = 0, 0, True
        try:
            while more and received <= DISCARD_BODIES * self._most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                received += len(chunks[-1])
                more = message.get("more_body", False)
                if received > self._most:
                    chunks.clear()
                    held = self._hold(held, 0)
                elif more:
                    held = self._hold(held, received)
        finally:
            if held:
                self._hold(held, 0)
        if received > self._most:
            raise RequestError("body_too_large", f"the body may have at most {self._most} bytes")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _hold(self, before: int, now: int) -> int:
        """Count that a body which has come in part holds so many bytes, in place of `before`. Returns `now`. Raises
        RequestError, and counts nothing, where that is too much with all others."""
        held = self.held - before + now
        if now > before and held > MAX_BODIES_BYTES:
            self._refused()
            raise RequestError("unavailable", "too much is being received in parts; try again later")
        self.held, self.peak = held, max(held, self.peak)
        return now
