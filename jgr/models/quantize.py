# SPDX-License-Identifier: Apache-2.0
"""Generators' weights in 8 bits (model.quantize): rounded when they are read, a matrix at a time.

    scale[f]     = max over d of |w[d, f]|, divided by the largest number of the type (127, or 448)
    values[d, f] = w[d, f] / scale[f], rounded to the nearest, to even in the middle

Symmetric, a factor for each output channel, weights only: activations stay as they are. Matrices are the parameters
whose `Spec` has a fan_in. Embeddings, output rows, norms and biases stay in model.dtype: their errors go straight into
scores, and programs gather their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jgr.models.devices import Placement
from jgr.models.params import CheckpointError, PyTree, Spec
from jgr.ops.quantized import Quantized

Quantization = Literal["", "int8", "fp8"]
"""How matrices are held; empty: as model.dtype says."""
HELD: Mapping[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""The dtype of Quantized.values."""
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST: Mapping[str, float] = {"int8": 127.0, "fp8": 448.0}
"""The largest number of each type that is used."""
SCALE_BYTES = 4


def is_matrix(spec: Spec) -> bool:
    """Whether a parameter [..., D, F] is multiplied by, so that it can be held in 8 bits."""
    return bool(spec.fan_in)


def scale_spec(spec: Spec) -> Spec:
    """The declaration of a matrix's factors: its own without the axis that is summed over."""
    return Spec((*spec.shape[:-2], spec.shape[-1]), (*spec.axes[:-2], spec.axes[-1]), "ones")


def rounded(matrix: npt.NDArray[Any], kind: Quantization) -> Quantized:
    """A matrix [D, F] of floating numbers in 8 bits, on the host. Raises CheckpointError for one that is not finite."""
    whole = np.asarray(matrix, np.float32)
    most = np.maximum(whole.max(-2, initial=0), -whole.min(-2, initial=0))
    if not np.isfinite(most).all():
        raise CheckpointError("it holds what is no finite number")
    scale = np.where(most > 0, most / np.float32(LARGEST[kind]), np.float32(1)).astype(np.float32)
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    values = whole / scale[..., None, :]
    if kind == "int8":
        np.rint(values, out=values)
        return Quantized(values.astype(np.int8), scale)
    return Quantized(values.astype(FP8).view(np.uint8), scale)


def put(spec: Spec, layers: Iterable[Quantized], placement: Placement) -> Quantized:
    """The matrices of a stack [L, D, F], or one alone [D, F], where they are served. layers: of the host, in order."""
    values, scale = None, np.empty(scale_spec(spec).shape, np.float32)
    for at, layer in enumerate(layers):
        if values is None:  # the first says of which type they are
            values = np.empty(spec.shape, layer.values.dtype)
        where = at if len(spec.shape) > 2 else ...
        values[where], scale[where] = layer.values, layer.scale
    assert values is not None
    return Quantized(placement.put(spec, values), placement.put(scale_spec(spec), scale))


def of_array(
    name: str, spec: Spec, array: npt.NDArray[Any], kind: Quantization, placement: Placement
) -> Quantized:
    """A stack of matrices [L, D, F], or one alone [D, F], rounded layer by layer and put where it is served."""
    layers = array if array.ndim > 2 else array[None]
    try:
        return put(spec, (rounded(layer, kind) for layer in layers), placement)
    except CheckpointError as error:
        raise CheckpointError(f"damaged checkpoint: {name}: {error}") from None


def served_bytes(specs: Iterable[Spec], dtype: Any, kind: Quantization) -> int:
    """Bytes of parameters as they are served."""
    item = jnp.dtype(dtype).itemsize
    total = 0
    for spec in specs:
        is_small = bool(kind) and is_matrix(spec)
        total += math.prod(spec.shape) * (1 if is_small else item)
        total += math.prod(scale_spec(spec).shape) * SCALE_BYTES if is_small else 0
    return total


def kind_of(params: PyTree) -> Quantization:
    """How the matrices of parameters are held."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantized)):
        if isinstance(leaf, Quantized):
            return "int8" if leaf.values.dtype == HELD["int8"] else "fp8"
    return ""


def versioned(revision: str, kind: Quantization) -> str:
    """The revision of a folder whose weights are rounded when they are read: another than the folder's, for it answers
    otherwise, and its keys and values are others."""
    return f"{revision}-{kind}" if kind else revision


def declared(specs: PyTree, kind: Quantization, dtype: Any = jnp.float32) -> PyTree:
    """The declaration as shapes and dtypes, of which matrices are Quantized, see params.abstract."""

    def of(spec: Spec) -> Any:
        if not kind or not is_matrix(spec):
            return jax.ShapeDtypeStruct(spec.shape, dtype)
        scale = jax.ShapeDtypeStruct(scale_spec(spec).shape, jnp.float32)
        return Quantized(jax.ShapeDtypeStruct(spec.shape, HELD[kind]), scale)

    return jax.tree.map(of, specs, is_leaf=lambda x: isinstance(x, Spec))
