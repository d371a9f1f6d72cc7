# SPDX-License-Identifier: Apache-2.0
"""The optional library of kernels for CPUs, jgr-native: whether it is there, and calls of it.

jgr is Python alone and installs without a compiler; where the package `jgr_native` (the folder native/) is installed
too, its kernels are one more form of the ops that have one, and "auto" takes it on CPUs. The library looks up what its
processor can do when it is loaded. Its calls run on the threads of XLA's own pool.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INTERFACE = 6
"""The calls that this version of jgr makes; the library must have the same number."""
TYPES = ("float32", "bfloat16")
CALLS = {
    **dict.fromkeys(("attention", "beam_attention", "inputs", "output"), TYPES),
    "attention_mass": TYPES[:1],
    **dict.fromkeys(("pack", "dense", "token_logits"), TYPES[1:]),
}
"""The calls of the library, each with the types of its arrays."""
COLUMNS, DEPTH = 64, {"float32": 1, "bfloat16": 32}
"""Packed weights have panels of so many columns at most, over all instruction sets, and a multiple of so many rows; see
`packed_size`."""
TILE = 32
"""The rows and columns that matrices of bfloat16 have a multiple of, once they are packed."""
KEYS = 96
"""The keys of a block of attention; see `arranged_size`."""
HEAD = 32
"""Heads in bfloat16 have a multiple of so many numbers."""

_log = logging.getLogger(__name__)
_wanted = True


class Library(NamedTuple):
    """kernels: the instruction sets in use, such as "avx512" or "avx512+amx", "" without a library. problem: why there
    is none, "" with one. types: of TYPES, those that it computes in on this processor."""

    kernels: str
    problem: str
    types: tuple[str, ...] = ()


@functools.cache
def library() -> Library:
    """Load the library and tell XLA of its calls, once a process. One that cannot be used is warned of."""
    if importlib.util.find_spec("jgr_native") is None:
        return Library("", "jgr-native is not installed")
    import ctypes

    try:
        package = importlib.import_module("jgr_native")
        if package.INTERFACE != INTERFACE:
            raise OSError(
                f"jgr-native has interface {package.INTERFACE}, and {INTERFACE} is wanted: install it anew"
            )
        shared = package.library()
        for call, types in CALLS.items():
            for dtype in types:
                capsule = jax.ffi.pycapsule(shared[f"jgr_native_{call}_{dtype}"])
                jax.ffi.register_ffi_target(_target(call, dtype), capsule, platform="cpu")
        names = []
        for name in (shared.jgr_native_kernels, shared.jgr_native_bfloat16_kernels):
            name.restype = ctypes.c_char_p
            names.append(name().decode())
        return Library("+".join(filter(None, names)), "", TYPES if names[1] else TYPES[:1])
    except (
        Exception
    ) as error:  # of another jaxlib, of another machine, damaged: XLA computes the same without it
        _log.warning("jgr-native cannot be used: %s", error)
        return Library("", f"jgr-native cannot be used: {error}")


def use(wanted: bool) -> None:
    """Whether "auto" may take the library, for all programs that this process makes from now on."""
    global _wanted
    _wanted = wanted


def wanted() -> bool:
    """Whether "auto" may take the library, as `use` said; at the start it may."""
    return _wanted


def in_use() -> str:
    """The library's instruction set where "auto" may take it; "" where XLA computes everything."""
    there = _wanted and library().kernels
    return there if there and jax.default_backend() == "cpu" else ""


def describe() -> str:
    """Who computes where a library could: "native-avx512", with its instruction set, or "xla"."""
    kernels = in_use()
    return f"native-{kernels}" if kernels else "xla"


def unusable(*arrays: jax.Array, head: int) -> str | None:
    """Why the library cannot take these arrays, of one type, and heads of so many numbers, or None."""
    if (types := {x.dtype.name for x in arrays}) not in [{name} for name in TYPES]:
        return f"the library computes in one of {', '.join(TYPES)}, not in {', '.join(sorted(types))}"
    if library().problem:
        return library().problem
    (dtype,) = types
    if dtype not in library().types:
        return f"the library has no kernels for {dtype} on this processor"
    return f"the size of a head is no multiple of {HEAD}" if dtype == "bfloat16" and head % HEAD else None


def call(
    name: str, made: Sequence[tuple[int, ...] | jax.ShapeDtypeStruct], *arrays: jax.Array, **options: Any
) -> list[jax.Array]:
    """The outputs `made` of one of CALLS: shapes, of the type of the first array where it is not said."""
    dtype = arrays[0].dtype
    results = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x, dtype) for x in made]
    given = {k: np.int64(x) if isinstance(x, int) else np.float32(x) for k, x in options.items()}
    return list(jax.ffi.ffi_call(_target(name, dtype.name), results)(*arrays, **given))


def packed_size(dtype: Any, *matrices: tuple[int, int]) -> int:
    """Numbers that matrices [rows, columns] take at most when they are packed into panels."""
    depth = DEPTH[jnp.dtype(dtype).name]
    return sum(-(-rows // depth) * depth * -(-columns // COLUMNS) * COLUMNS for rows, columns in matrices)


def tiled_size(rows: int, columns: int) -> int:
    """Numbers of a matrix [rows, columns] of bfloat16 in tiles of TILE rows and columns."""
    return -(-rows // TILE) * TILE * -(-columns // TILE) * TILE


def arranged_size(values: tuple[int, ...], dtype: Any) -> int:
    """Numbers that the values [B, K, T, d] of an attention take in the order in which the library multiplies them: none
    in float32, which takes them as they are."""
    batch, heads, tokens, dim = values
    return 0 if dtype == jnp.float32 else batch * heads * -(-tokens // KEYS) * KEYS * dim


def _target(call: str, dtype: str) -> str:
    """The name of a call within programs; those on disk name the interface that they were compiled for."""
    return f"jgr_native_{call}_{dtype}_{INTERFACE}"
