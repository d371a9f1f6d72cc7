# SPDX-License-Identifier: Apache-2.0
"""From an item's metadata to its record: which features there are, and the numbers in them.

Numbers stay numbers. A text is a category: 1 plus its hash below 2^31 - 2, so that a model takes it modulo the rows of
its table; 0 is no category. A list fills a feature from the left, what is too long is cut, what is missing is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.config import UserError
from jgr.features.schema import Feature, Schema, SchemaError

MAX_WIDTH = 16
_INT32 = np.iinfo(np.int32)

Metadata = Mapping[str, Any]


class ExtractionError(UserError):
    """Metadata that does not fit the schema."""


def derive(metadata: Sequence[Metadata]) -> Schema:
    """The features that the items' metadata holds, in order of name, at most MAX_WIDTH numbers of a list.

    Whole numbers become int32, others float32, texts int32 categories. A field whose texts are mostly of one item
    alone, such as a title, is left out, and so is what is neither number nor text. SchemaError where nothing is left.
    """
    names = sorted({name for fields in metadata for name in fields})
    found = [feature for name in names if (feature := _feature(name, metadata)) is not None]
    if not found:
        raise SchemaError("the items' metadata holds no feature: no numbers, and no texts that items share")
    return Schema.parse(",".join(map(str, found)))


def _feature(name: str, metadata: Sequence[Metadata]) -> Feature | None:
    lists = [_listed(fields[name]) for fields in metadata if fields.get(name) is not None]
    values = [value for listed in lists for value in listed]
    width = min(MAX_WIDTH, max(map(len, lists), default=0))
    if not width:
        return None
    if all(isinstance(value, str) for value in values):
        shared = 2 * len(set(values)) <= len(values)
        return Feature(name, "int32", width) if shared else None
    if not all(isinstance(value, int | float) for value in values):
        return None
    whole = all(isinstance(value, int) and _INT32.min <= value <= _INT32.max for value in values)
    return Feature(name, "int32" if whole else "float32", width)


def extract(schema: Schema, item_ids: Sequence[str], metadata: Sequence[Metadata]) -> list[bytes]:
    """The items' records. ExtractionError names the item and the field that does not fit."""
    return schema.pack(columns(schema, item_ids, metadata))


def columns(
    schema: Schema, item_ids: Sequence[str], metadata: Sequence[Metadata]
) -> dict[str, npt.NDArray[Any]]:
    """What `extract` packs: [n, width] of each feature's dtype."""
    found = {}
    for feature in schema.features:
        column = np.zeros((len(metadata), feature.width), feature.dtype)
        for row, fields in enumerate(metadata):
            value = fields.get(feature.name)
            if value is None:
                continue
            try:
                numbers = [_number(feature, one) for one in _listed(value)[: feature.width]]
            except (ValueError, OverflowError) as cause:
                place = f"item {item_ids[row]!r}: {feature.name}"
                raise ExtractionError(f"{place}: {value!r} does not fit {feature}: {cause}") from None
            column[row, : len(numbers)] = numbers
        found[feature.name] = column
    return found


def of_catalog(schema: str, catalog: Catalog) -> dict[str, npt.NDArray[Any]]:
    """`columns` of a schema's text, for the items of a catalog; empty: none. UserError."""
    return columns(Schema.parse(schema), catalog.item_ids, catalog.metadata) if schema else {}


def category(text: str) -> int:
    """The number of a text: 1 to 2^31 - 2."""
    hashed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return 1 + hashed % (_INT32.max - 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _number(feature: Feature, value: Any) -> float | int:
    if isinstance(value, str):
        if feature.dtype != "int32":
            raise ValueError("a text is an int32 category")
        return category(value)
    if not isinstance(value, int | float):
        raise ValueError("neither a number nor a text")
    if feature.dtype.startswith("float"):
        with np.errstate(over="ignore"):
            fits = math.isfinite(value) and bool(np.isfinite(np.dtype(feature.dtype).type(value)))
    else:
        bounds = np.iinfo(feature.dtype)
        fits = bounds.min <= value <= bounds.max and value == int(value)
    if not fits:
        raise ValueError("out of range, or not a whole number")
    return value
