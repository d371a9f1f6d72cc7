# SPDX-License-Identifier: Apache-2.0
"""Weights that are in memory once: a model that is loaded while an equal one is served takes that one's arrays.

Equal is what is read from files of the same content, in the same form and onto the same devices. So a reload of another
tokenizer, catalog or setting takes no second copy of the weights, nor the time to read them; and neither do two models
of a server that differ in such things alone. Nothing is kept for it: what no engine holds any more is freed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from jgr.models.model_files import ModelFiles

Cfg = TypeVar("Cfg")
Params = TypeVar("Params")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Weights(Generic[Cfg, Params]):
    """A model's architecture and parameters; who serves them holds this."""

    cfg: Cfg
    params: Params


_lock = threading.Lock()
_held: weakref.WeakValueDictionary[Hashable, Weights[object, object]] = weakref.WeakValueDictionary()


def once(files: ModelFiles, form: Hashable, read: Callable[[], tuple[Cfg, Params]]) -> Weights[Cfg, Params]:
    """The weights of a model's files in a form, which somebody holds or `read` gives. form: all that they depend on
    besides, and of which kind they are. Raises CheckpointError where files change while they are read."""
    key = files.weights(), form
    with _lock:
        found = _held.get(key)
    if found is not None:
        _log.info("its weights are in memory already: they are shared, and not read again")
        return found  # type: ignore[return-value]  # of one key are those of one `read`
    new = Weights(*read())
    files.revision()  # what was read is what was hashed
    with _lock:
        _held[key] = new  # type: ignore[assignment]
    return new
