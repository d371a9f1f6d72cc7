# SPDX-License-Identifier: Apache-2.0
"""How an op picks its implementation: a named one runs or raises, "auto" takes the first that supports the call.

The choice is made at trace time from shapes, dtypes and platform, by asking `supports`, never by catching exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op. supports(*args, **kwargs) gives the reason why it cannot run, or None."""

    name: str
    call: Callable[..., Any]
    supports: Callable[..., str | None] = lambda *args, **kwargs: None


def dispatch(
    op: str, implementations: Sequence[Implementation], implementation: str, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` by the named implementation, or by the first in order that supports the arguments ("auto").

    Raises ValueError for an unknown name, and for a named implementation that does not support the arguments.
    """
    if implementation == "auto":
        chosen = next(i for i in implementations if i.supports(*args, **kwargs) is None)
    else:
        named = {i.name: i for i in implementations}
        if implementation not in named:
            raise ValueError(
                f"{op}: no implementation {implementation!r}; there are {sorted(named)} and 'auto'"
            )
        chosen = named[implementation]
        reason = chosen.supports(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"{op}: implementation {implementation!r} cannot run: {reason}")
    _log.debug("%s runs as %s", op, chosen.name)  # at trace time, so once per compiled program
    return chosen.call(*args, **kwargs)
