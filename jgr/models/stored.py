# SPDX-License-Identifier: Apache-2.0
"""The arrays of an Orbax checkpoint, read by TensorStore: params/ is a key-value store with a zarr array a parameter.

Orbax reads by TensorStore too, in threads that print tracebacks of what is damaged and outlive the call. Here a call
opens every array first, which costs a few hundred bytes each, so that names, shapes and dtypes are known to be right
before anything is read; and what goes wrong is one exception, in the caller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import tensorstore as ts

from jgr import stopping
from jgr.fields import one_line
from jgr.models.params import CheckpointError, Spec, check_shapes

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
METADATA = {".zarray": "zarr", "zarr.json": "zarr3"}
"""The file that describes an array, and the driver that reads it."""
READ_AHEAD = 2
LOOK_S = 0.2
"""Between two looks whether who waits for a read is to stop."""


class StoredArrays:
    """The arrays in `path`, open: those that `declared` names, by name, and no others.

    Raises CheckpointError where they cannot be opened, and naming every array that is missing, unexpected, of another
    shape, or of no floating dtype.
    """

    def __init__(self, path: Path, declared: Mapping[str, Spec]) -> None:
        try:
            self._stores = _open(path)
        except stopping.Stopped:
            raise
        except Exception as error:  # TensorStore raises many kinds for damaged files
            raise _damaged(error) from None
        check_shapes(declared, {name: store.shape for name, store in self._stores.items()})
        for name, store in self._stores.items():
            dtype = store.dtype.name
            chunk = [size or 0 for size in store.chunk_layout.read_chunk.shape or ()]
            if dtype not in DTYPES:
                raise CheckpointError(f"damaged checkpoint: {name} is of dtype {dtype}")
            if math.prod(chunk) > max(1, math.prod(store.shape)):
                raise CheckpointError(
                    f"damaged checkpoint: {name} has chunks of {tuple(chunk)}, larger than itself"
                )

    @property
    def largest(self) -> int:
        """Bytes of the largest array, as it is stored."""
        sizes = (math.prod(store.shape) * store.dtype.numpy_dtype.itemsize for store in self._stores.values())
        return max(sizes, default=0)

    def read(self, names: Sequence[str]) -> Iterator[npt.NDArray[Any]]:
        """Read arrays one after the other; a few are on their way at a time. Raises CheckpointError."""
        waiting: deque[tuple[str, Any]] = deque()
        try:
            for name in names:
                waiting.append((name, self._stores[name].read()))
                if len(waiting) == READ_AHEAD:
                    yield _result(waiting.popleft()[1])
            while waiting:
                yield _result(waiting.popleft()[1])
        except stopping.Stopped:
            raise
        except Exception as error:
            raise _damaged(error) from None


def _open(path: Path) -> dict[str, ts.TensorStore]:
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    kv = _result(ts.KvStore.open(base, context=context))
    found = {}
    for key in _result(kv.list()):
        name, _, file = key.decode().rpartition("/")
        if file in METADATA:
            spec = {
                "driver": METADATA[file],
                "kvstore": {**base, "path": f"{name}/"},
                "fill_missing_data_reads": False,  # or zeros would stand for what is not there
            }
            found[name] = ts.open(spec, open=True, read=True, context=context)
    return {name: _result(future) for name, future in found.items()}


def _result(future: Any) -> Any:
    """What TensorStore's threads have read. Who waits for them can be stopped, though a disk may hang."""
    while True:
        stopping.check()
        try:
            return future.result(timeout=LOOK_S)
        except TimeoutError:
            if future.done():  # the error is the reading's own
                raise


def _damaged(error: Exception) -> CheckpointError:
    """TensorStore's message on one bounded line, without its own source's lines."""
    text = one_line(str(error).split(" [", 1)[0]) or type(error).__name__
    return CheckpointError(f"damaged checkpoint: {text}")
