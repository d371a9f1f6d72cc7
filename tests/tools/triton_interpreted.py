# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton form of the shared stage by Triton's interpreter, on a CPU, in a process of its own.

    TRITON_INTERPRET=1 python -m tests.tools.triton_interpreted IN.npz OUT.npz

IN holds q, k, v, lengths, out and lse, the last two for the results; OUT gets out and lse.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from tests.tools.test_shared_stage import TILES
from tools.shared_stage import triton_kernel

TYPES = {"float16": "fp16", "float32": "fp32", "int32": "i32"}


class Tensor:
    """A NumPy array as the interpreter wants torch's, with nothing to copy: it is on the host."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Tensor:
        return Tensor(self.array)

    def set_(self, *_: Any) -> None: ...

    def copy_(self, *_: Any) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return ()


def main(source: str, target: str) -> None:
    arrays = {name: x.copy() for name, x in np.load(source).items()}
    batch, kv_heads, rows, dim = arrays["q"].shape
    names = ("q", "k", "v", "lengths", "out", "lse")
    grid = (-(-rows // TILES.rows), kv_heads * TILES.splits, batch)
    triton_kernel.shared_stage[grid](
        *(Tensor(arrays[name]) for name in names),
        batch=batch, kv_heads=kv_heads, all_rows=rows, room=arrays["k"].shape[1], dim=dim, rows=TILES.rows,
        tokens=TILES.tokens, splits=TILES.splits, scale=math.log2(math.e) / math.sqrt(dim),
    )  # fmt: skip
    np.savez(target, out=arrays["out"], lse=arrays["lse"])


if __name__ == "__main__":
    main(*sys.argv[1:])
