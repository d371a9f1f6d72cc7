# SPDX-License-Identifier: Apache-2.0
"""Turns an item's metadata into its feature record.

Numbers stay numbers. A text becomes a category: 1 plus its hash modulo 2^31 - 2, which a model takes modulo the rows of
its table; 0 means no category. A list fills a feature from the left; it is cut if too long and padded with 0.
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
from jgr.features.schema import Feature, Schema, SchemaError, is_name

MAX_WIDTH = 16
_INT32 = np.iinfo(np.int32)

Metadata = Mapping[str, Any]


class ExtractionError(UserError):
    """Metadata that does not fit the schema."""


def derive(metadata: Sequence[Metadata]) -> Schema:
    """Find the features that the items' metadata holds, sorted by name, with at most MAX_WIDTH numbers of a list.

    Whole numbers become int32, others float32, texts int32 categories. A field whose texts mostly belong to a single
    item, such as a title, is left out, and so are values that are neither number nor text, and `misnamed` fields.
    Raises SchemaError if no feature is left.
    """
    found = [feature for feature in _features(metadata) if is_name(feature.name)]
    if not found:
        raise SchemaError("the items' metadata holds no feature: no numbers, and no texts that items share")
    return Schema.parse(",".join(map(str, found)))


def misnamed(metadata: Sequence[Metadata]) -> list[str]:
    """The fields that `derive` leaves out for their names alone, which a schema's text cannot say, sorted."""
    return [feature.name for feature in _features(metadata) if not is_name(feature.name)]


def _features(metadata: Sequence[Metadata]) -> list[Feature]:
    names = sorted({name for fields in metadata for name in fields})
    return [feature for name in names if (feature := _feature(name, metadata)) is not None]


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
    """Make the items' records. Raises ExtractionError, naming the item and the field that does not fit."""
    return schema.pack(columns(schema, item_ids, metadata))


def columns(
    schema: Schema, item_ids: Sequence[str], metadata: Sequence[Metadata]
) -> dict[str, npt.NDArray[Any]]:
    """The items' features by name, [n, width] of the feature's dtype: the content of `extract`'s records."""
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
    """The features of a catalog's items, by the text of a schema; {} for an empty text. Raises UserError."""
    return columns(Schema.parse(schema), catalog.item_ids, catalog.metadata) if schema else {}


def category(text: str) -> int:
    """The category number of a text, 1 to 2^31 - 2."""
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
