# SPDX-License-Identifier: Apache-2.0
"""How the connection tells the application that a client has left, without a task that waits for it."""

from __future__ import annotations

from collections.abc import Callable


class Departure:
    """Whether the client that waits for the answer to one request has left, and what is cancelled then."""

    def __init__(self) -> None:
        self.happened = False
        self._cancel: Callable[[], object] | None = None

    def cancels(self, work: Callable[[], object] | None) -> None:
        """What to call when the client leaves, in place of what was told before; None: nothing."""
        self._cancel = work

    def happen(self) -> None:
        """The connection is lost."""
        self.happened = True
        if self._cancel is not None:
            self._cancel()
