# SPDX-License-Identifier: Apache-2.0
"""Long work that can be told to stop while it goes on, such as the load of a model.

The one idea: who begins the work says how it is told to stop, and the functions that it is made of ask between their
steps, without knowing who began it. Where nobody said anything, as in a command, asking costs next to nothing and never
stops. What is said holds in the thread that says it; `carried` takes it into the threads of a pool.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from jgr.fields import UserError

P = ParamSpec("P")
T = TypeVar("T")

_told: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar(
    "jgr_stopping", default=None
)


class Stopped(UserError):
    """The work was told to stop, and has stopped."""


@contextlib.contextmanager
def stoppable(told: Callable[[], bool]) -> Iterator[None]:
    """A context whose work stops at its next step once `told()` is true; any thread may make it so."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def check() -> None:
    """Raise Stopped where the work that this is a step of was told to stop."""
    told = _told.get()
    if told is not None and told():
        raise Stopped("it was cancelled")


def carried(call: Callable[P, T]) -> Callable[P, T]:
    """The call, which in any thread, and in several at a time, stops as the work of this thread does."""
    context = contextvars.copy_context()

    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(call, *args, **kwargs)

    return within
