# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints of Hugging Face in the layout of compressed-tensors, of 8 bits with a factor for each channel.

config.json has `quantization_config`; a matrix is `X.weight`, I8 or F8_E4M3 [out, in], and `X.weight_scale` [out, 1],
of which each row is values * scale. What is not this is refused by name: 4 bits, groups, blocks, zero points, packed or
sparse matrices, other methods, activations with fixed factors, a quantised output head or cache. Activations that such
a checkpoint means to be rounded at run time are not rounded here, which is nearer to the model that it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.models.params import CheckpointError
from jgr.models.quantize import FP8, Quantization

STORED: Mapping[str, str] = {"int8": "I8", "fp8": "F8_E4M3"}
"""The dtype of a matrix in safetensors."""
SUFFIX = "_scale"
"""What the name of a matrix's factors ends with, after the matrix's own."""

_METHOD = "compressed-tensors"
_KINDS: Mapping[str, tuple[str, Quantization]] = {
    "int-quantized": ("int", "int8"),
    "float-quantized": ("float", "fp8"),
}
_WEIGHTS: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": ("channel",),
    "dynamic": (False, None),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
"""What weights must say, field by field; a field that is absent says None."""
_KNOWN = {
    "quant_method", "format", "ignore", "config_groups",
    "version", "quantization_status", "global_compression_ratio",  # which say how the file was made
}  # fmt: skip


def parse(raw: Any) -> Quantization:
    """How the matrices of a checkpoint are held, of its quantization_config; empty where it has none.

    Raises CheckpointError naming what is not supported.
    """
    if raw is None:
        return ""
    if not isinstance(raw, Mapping) or raw.get("quant_method") != _METHOD:
        method = raw.get("quant_method") if isinstance(raw, Mapping) else raw
        raise _refused("quant_method", method, _METHOD)
    form = raw.get("format")
    if not isinstance(form, str) or form not in _KINDS:
        raise _refused("format", form, " or ".join(map(repr, _KINDS)))
    kind_of_number, kind = _KINDS[form]
    for name in raw.keys() - _KNOWN:  # such as a transform of what comes into a matrix
        if raw[name]:
            raise _refused(str(name), raw[name], None)
    ignored = raw.get("ignore") or []
    if ignored not in ([], ["lm_head"]):
        raise _refused("ignore", ignored, ["lm_head"])
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", groups, "one group")
    (group,) = groups.values()
    if isinstance(group, Mapping) and group.get("format") not in (None, form):
        raise _refused("format of the group", group["format"], form)
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise _refused("targets", group.get("targets") if isinstance(group, Mapping) else group, ["Linear"])
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise _refused("weights", weights, "8 bits for each channel")
    for name, good in {"type": (kind_of_number,), **_WEIGHTS}.items():
        if weights.get(name) not in good:
            raise _refused(f"weights.{name}", weights.get(name), good[0])
    if inputs is not None and not (isinstance(inputs, Mapping) and inputs.get("dynamic") is True):
        raise _refused("input_activations", inputs, "none, or dynamic")
    if group.get("output_activations") is not None:
        raise _refused("output_activations", group["output_activations"], None)
    return kind


def _refused(name: str, found: Any, wanted: Any) -> CheckpointError:
    return CheckpointError(f"quantization_config: {name}={found!r} is not supported (supported: {wanted!r})")


def read_fp8(path: Path, name: str) -> npt.NDArray[Any]:
    """The bits of a tensor of dtype F8_E4M3, which numpy has no type for, of a safetensors file whose header is sound.

    Raises CheckpointError where it has what is no finite number.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        described = json.loads(file.read(size))[name]
        begin, end = described["data_offsets"]
        file.seek(8 + size + begin)
        found = np.frombuffer(file.read(end - begin), FP8)
    if not np.isfinite(found).all():
        raise CheckpointError(f"{path}: damaged checkpoint: {name} holds what is no finite number")
    return found.view(np.uint8).reshape(described["shape"])
