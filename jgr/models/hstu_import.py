# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Meta's generative-recommenders: HSTU's research form (MODEL-9).

They are published as files of torch.save, which hold Python objects and are not read here. Write their arrays again,

    state = torch.load(path, map_location="cpu")["model_state_dict"]
    numpy.savez("hstu.npz", **{name: x.float().numpy() for name, x in state.items()})

or with safetensors. `module.` may stand in front of every key. Keys that are missing, unexpected or of another shape
are an error that names them.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jgr.models import hstu
from jgr.models.hstu import EXTRA_POSITIONS, HstuConfig, HstuLayer, HstuParams
from jgr.models.params import CheckpointError, check

State = Mapping[str, npt.NDArray[Any]]

_ITEMS, _POSITIONS = "_embedding_module._item_emb.weight", "_input_features_preproc._pos_emb.weight"
_LAYER = "_hstu._attention_layers."
_UVQK, _OUT, _OUT_BIAS = "_uvqk", "_o.weight", "_o.bias"
_BIAS_POSITIONS, _BIAS_TIMES = "_rel_attn_bias._pos_w", "_rel_attn_bias._ts_w"
_MASK = "_attn_mask"  # a buffer; what it says follows from N


def read_state(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz or .safetensors file by their keys, without `module.` in front. Raises CheckpointError."""
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        elif path.suffix == ".npz":
            with np.load(path) as content:
                state = {name: content[name] for name in content.files}
        else:
            raise CheckpointError(
                f"{path}: must be a .npz or .safetensors of the state dict, not torch.save's"
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return {name.removeprefix("module."): array for name, array in state.items()}


def research(
    state: State, item_ids: Sequence[str], items: str, *, heads: int, concat_ua: bool = False
) -> tuple[HstuConfig, HstuParams]:
    """HSTU's research form for a catalog of these items; sizes are read from the shapes. Raises CheckpointError.

    item_ids: [n] decimal ids; as in MovieLens, an id is the number of its row in the checkpoint's item table, and
    row 0 is padding. items: their digest. heads, concat_ua: the caller states them, since no shape shows them.
    """
    found = {name: x for name, x in state.items() if not name.endswith(_MASK)}
    layers = _count(found, _LAYER)
    suffixes = [_UVQK, _OUT, _OUT_BIAS]
    tables = [name for name in (_BIAS_POSITIONS, _BIAS_TIMES) if f"{_LAYER}0.{name}" in found]
    wanted = {f"{_LAYER}{i}.{name}" for i in range(layers) for name in (*suffixes, *tables)}
    _refuse_other_keys(found, wanted | {_ITEMS, _POSITIONS})

    def of(name: str) -> npt.NDArray[Any]:
        return _stack([found[f"{_LAYER}{i}.{name}"] for i in range(layers)], name)

    uvqk, out, length = of(_UVQK), of(_OUT).swapaxes(1, 2), len(found[_POSITIONS])
    values = out.shape[1] // (3 if concat_ua else 1)
    keys = uvqk.shape[-1] // 2 - values
    if values % heads or keys % heads:
        raise CheckpointError(f"heads: {heads} do not divide {values} values and {keys} keys of a layer")
    embed = _rows_of(found[_ITEMS], item_ids)
    cfg = HstuConfig(
        n_items=len(item_ids), max_items=max(length - EXTRA_POSITIONS, 1), hidden=embed.shape[1], layers=layers,
        heads=heads, qk_dim=keys // heads, v_dim=values // heads, length=length, items=items,
        bias="times" if _BIAS_TIMES in tables else "positions" if tables else "none", concat_ua=concat_ua,
    )  # fmt: skip
    positions, times = (
        of(name)[:, None] if name in tables else None for name in (_BIAS_POSITIONS, _BIAS_TIMES)
    )
    layer = HstuLayer(uvqk, out, of(_OUT_BIAS)[:, None], positions, times)
    params: HstuParams = _checked(hstu.spec(cfg), HstuParams(embed, found[_POSITIONS], layer))
    return cfg, params


def _count(state: State, prefix: str) -> int:
    numbered = (re.match(rf"{re.escape(prefix)}(\d+)\.", name) for name in state)
    return max((int(found[1]) + 1 for found in numbered if found), default=1)


def _refuse_other_keys(state: State, wanted: set[str]) -> None:
    problems = [f"missing {name}" for name in sorted(wanted - state.keys())]
    problems += [f"unexpected {name}" for name in sorted(state.keys() - wanted)]
    if problems:
        raise CheckpointError("the state dict is not of this model: " + "; ".join(problems))


def _stack(arrays: list[npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise CheckpointError(f"{name} has other shapes in other layers: {sorted(shapes)}")
    return np.stack(arrays)


def _rows_of(table: npt.NDArray[Any], item_ids: Sequence[str]) -> npt.NDArray[Any]:
    unknown = [i for i in item_ids if not (i.isdecimal() and 0 < int(i) < len(table))]
    if unknown:
        raise CheckpointError(
            f"{_ITEMS} has rows 1 to {len(table) - 1}; item {unknown[0]!r} is none of them"
            f" ({len(unknown)} of {len(item_ids)} items)"
        )
    return table[[int(i) for i in item_ids]]


def _checked(specs: Any, params: Any) -> Any:
    check(specs, params)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
