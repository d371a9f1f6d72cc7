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

INTERFACE = 3
"""The calls that this version of jgr makes; the library must have the same number."""
CALLS = ("attention", "inputs", "output")
COLUMNS = 64
"""The most columns of a panel of packed weights, over all instruction sets; see `packed_size`."""

_log = logging.getLogger(__name__)
_wanted = True


class Library(NamedTuple):
    """kernels: the instruction set in use, "" without a library. problem: why there is none, "" with one."""

    kernels: str
    problem: str


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
        for call in CALLS:
            capsule = jax.ffi.pycapsule(shared[f"jgr_native_{call}"])
            jax.ffi.register_ffi_target(_target(call), capsule, platform="cpu")
        shared.jgr_native_kernels.restype = ctypes.c_char_p
        return Library(shared.jgr_native_kernels().decode(), "")
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


def unusable(*arrays: jax.Array) -> str | None:
    """Why the library cannot take these arrays, or None."""
    if any(x.dtype != jnp.float32 for x in arrays):
        return "the library computes in float32"
    return library().problem or None


def call(name: str, made: Sequence[tuple[int, ...]], *arrays: jax.Array, **options: Any) -> list[jax.Array]:
    """The outputs, float32 of shapes `made`, of one of CALLS."""
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in made]
    given = {key: np.float32(value) for key, value in options.items()}
    return list(jax.ffi.ffi_call(_target(name), results)(*arrays, **given))


def packed_size(*matrices: tuple[int, int]) -> int:
    """Floats that matrices [rows, columns] take when they are packed into panels."""
    return sum(rows * -(-columns // COLUMNS) * COLUMNS for rows, columns in matrices)


def _target(call: str) -> str:
    """The name of a call within programs; those on disk name the interface that they were compiled for."""
    return f"jgr_native_{call}_{INTERFACE}"
