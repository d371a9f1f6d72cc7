# SPDX-License-Identifier: Apache-2.0
"""Reading a model folder's config.json, whoever wrote it: bounded, and with one error for all that is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jgr.files import read_whole
from jgr.models.params import CheckpointError

MAX_BYTES = 1 << 20
LARGEST = 2**31 - 1
"""Every size of a model fits into 32 bits; a larger number is damage."""
LARGEST_DEPTH = 10_000
"""The most layers of a model; what names a tensor for each layer stays small."""
NEVER_0 = frozenset(("n_items", "max_items", "hidden", "heads", "kv_heads", "head_dim", "qk_dim", "v_dim"))
"""Sizes of which no model has 0."""

T = TypeVar("T")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError where there is none."""
    if not path.exists():
        raise CheckpointError(
            _of_dataset(path.parent) or f"{path}: no such file; a model folder holds a config.json"
        )
    if not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path}: is no file; a model folder holds a config.json")
    try:
        raw = json.loads(read_whole(path, CheckpointError, MAX_BYTES))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return raw


def _of_dataset(folder: Path) -> str:
    """What to do with a folder that is a prepared dataset and no model; "" for any other."""
    from jgr.data.prepared import INTERACTIONS, MANIFEST, catalog_names

    if not all((folder / name).is_file() for name in (MANIFEST, INTERACTIONS)):
        return ""
    names = catalog_names(folder)
    ids = "" if names else f"first give its items ids with jgr ids --data={folder}, then "
    named = f"--set data.catalog={names[0]} " if names and names[0] else ""
    return (
        f"{folder}: is a dataset that jgr prepare wrote, and no model: {ids}train one on it with "
        f"jgr train --config=shop --set data.kind=prepared --set data.path={folder} {named}--set train.out=MODEL"
    )


def scorer_config(raw: Mapping[str, Any], kinds: Mapping[str, type[T]]) -> T:
    """The config that an object describes, by its model_type. Raises ValueError, which says what is wrong."""
    import msgspec  # models without a folder do not need it

    fields = dict(raw)
    name = fields.pop("model_type", None)
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"model_type {name!r} is none of {', '.join(kinds)}")
    _check_numbers("", fields)
    unknown = fields.keys() - kinds[name].__dataclass_fields__.keys()  # type: ignore[attr-defined]
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    try:
        return msgspec.convert(fields, kinds[name])
    except (msgspec.MsgspecError, TypeError, ArithmeticError) as error:
        raise ValueError(str(error)) from None


def _check_numbers(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for inner, content in value.items():
            _check_numbers(inner, content)
    elif isinstance(value, list):
        for content in value:
            _check_numbers(name, content)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    elif isinstance(value, int):
        least, most = int(name in NEVER_0), LARGEST_DEPTH if name == "layers" else LARGEST
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, which is no size of a model")
