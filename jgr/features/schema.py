# SPDX-License-Identifier: Apache-2.0
"""The form of an item's feature record: a header of 16 bytes, then named features of fixed dtype and width.

    b"jgr\\x01" | 8 bytes: sha256 of the schema's text | uint32: bytes of the whole record | the features, in order

The one idea: all records of a schema have the same length and the same header, so that a record is checked by two
comparisons, and n records end to end are an array. Numbers are little endian, a feature begins at a multiple of its
number's size, and a record's length is a multiple of 4. All features zero is the default record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.config import UserError
from jgr.fields import one_line

DTYPES = ("float32", "float16", "int32", "int16", "int8", "uint8")
MAX_RECORD_BYTES = 1 << 16
MAX_FEATURES = 4096
MAX_SHOWN = 100
"""Characters of a text that an error quotes."""
_MAGIC = b"jgr\x01"
_HEADER_BYTES = 16
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_FEATURE = re.compile(rf"(?P<name>{_NAME})\s*:\s*(?P<dtype>\w+)\s*(\[(?P<width>[1-9]\d{{0,4}})\])?")


class SchemaError(UserError):
    """A schema that cannot be used."""


def is_name(text: str) -> bool:
    """Whether a feature may be called that, so that a schema's text can say it."""
    return re.fullmatch(_NAME, text) is not None


@dataclass(frozen=True)
class Feature:
    """One feature. dtype: one of DTYPES. width: how many numbers it has."""

    name: str
    dtype: str
    width: int = 1

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}" + (f"[{self.width}]" if self.width > 1 else "")


@dataclass(frozen=True)
class Schema:
    """The features of a record, in order; use `parse`, which checks them. Its text names it: str(schema)."""

    features: tuple[Feature, ...]

    @classmethod
    def parse(cls, text: str) -> Schema:
        """Read a text such as "price:float32, genres:int32[4]". Raises SchemaError, naming the wrong feature."""
        features = dict[str, Feature]()
        parts = text.split(",", MAX_FEATURES)
        if len(parts) > MAX_FEATURES:
            raise SchemaError(f"features: there are more than {MAX_FEATURES}")
        for part in parts:
            found = _FEATURE.fullmatch(part.strip())
            if found is None or found["dtype"] not in DTYPES:
                known = ", ".join(DTYPES)
                shown = one_line(part.strip(), MAX_SHOWN)
                raise SchemaError(f"features: {shown!r} is not name:dtype[width], dtype of {known}")
            feature = Feature(found["name"], found["dtype"], int(found["width"] or 1))
            if feature.name in features:
                raise SchemaError(f"features: {one_line(feature.name, MAX_SHOWN)!r} is named twice")
            features[feature.name] = feature
        schema = cls(tuple(features.values()))
        if schema.record_bytes > MAX_RECORD_BYTES:
            raise SchemaError(
                f"features: a record of {schema.record_bytes} bytes; {MAX_RECORD_BYTES} are the most"
            )
        return schema

    def __str__(self) -> str:
        return ",".join(map(str, self.features))

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """The NumPy dtype of a record: each feature is a field of shape (width,)."""
        names, formats, offsets, end = [], [], [], _HEADER_BYTES
        for feature in self.features:
            number = np.dtype(feature.dtype).newbyteorder("<")
            start = -(-end // number.itemsize) * number.itemsize
            names.append(feature.name)
            formats.append((number, (feature.width,)))
            offsets.append(start)
            end = start + number.itemsize * feature.width
        fields: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": -(-end // 4) * 4}
        record: np.dtype[np.void] = np.dtype(fields)
        return record

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record, its header included."""
        return self.dtype.itemsize

    @cached_property
    def header(self) -> bytes:
        named = hashlib.sha256(str(self).encode()).digest()[:8]
        return _MAGIC + named + self.record_bytes.to_bytes(4, "little")

    @cached_property
    def default(self) -> bytes:
        """The record of an item without features: FLAME-2's EMPTY."""
        return self.header.ljust(self.record_bytes, b"\0")

    def faults(self, values: Sequence[bytes | None]) -> list[tuple[int, str]]:
        """The positions of values that are not records or hold NaN or infinity, with the reason. None is accepted."""
        size, header = self.record_bytes, self.header
        found, sound = [], list[tuple[int, bytes]]()
        for place, value in enumerate(values):
            if value is None:
                continue
            if len(value) != size:
                found.append((place, f"has {len(value)} bytes, a record has {size}"))
            elif value[:_HEADER_BYTES] != header:
                found.append((place, "is not a record of this schema"))
            else:
                sound.append((place, value))
        floats = [feature.name for feature in self.features if feature.dtype.startswith("float")]
        if floats:  # NaN or infinity would make a score that is NaN, which fails a whole request
            records = self.records([value for _, value in sound])
            finite = np.all([np.isfinite(records[name]).all(axis=1) for name in floats], axis=0)
            found += [(sound[at][0], "has a number that is not finite") for at in np.flatnonzero(~finite)]
        return found

    def pack(self, columns: Mapping[str, npt.NDArray[Any]]) -> list[bytes]:
        """Make n records from an array [n, width] for each feature. Numbers are cast to the feature's dtype."""
        n = len(next(iter(columns.values())))
        records = np.frombuffer(bytearray(self.default * n), self.dtype)
        for feature in self.features:
            records[feature.name] = columns[feature.name]
        content, size = records.tobytes(), self.record_bytes
        return [content[start : start + size] for start in range(0, n * size, size)]

    def records(self, values: Sequence[bytes]) -> npt.NDArray[np.void]:
        """Copy n records without faults into one read-only array, [n] of `dtype`."""
        return np.frombuffer(b"".join(values), self.dtype)
