# SPDX-License-Identifier: Apache-2.0
"""How the connection tells the application that a client has left, without a task that waits for it."""

from __future__ import annotations

from collections.abc import Callable


class Client:
    """Who waits for the answer to one request; gone: not any more."""

    def __init__(self) -> None:
        self.gone = False
        self._work: Callable[[], object] | None = None

    def works(self, cancel: Callable[[], object] | None) -> None:
        """What cancels the work that is done for the client; it is called when the client leaves. None: there is
        none."""
        self._work = cancel

    def leave(self) -> None:
        """The connection is lost."""
        self.gone = True
        if self._work is not None:
            self._work()
