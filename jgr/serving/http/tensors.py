# SPDX-License-Identifier: Apache-2.0
"""Tensors of KServe's protocol as lists of Python values: from JSON, from bytes, and back to bytes.

Numbers are little-endian. An element of BYTES is its length, 4 bytes, and as many bytes; here they are text in UTF-8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from jgr.serving.errors import invalid, quoted
from jgr.serving.http.decoding import in_words

NUMBERS = {
    "BOOL": "?", "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "UINT8": "<u1", "UINT16": "<u2",
    "UINT32": "<u4", "UINT64": "<u8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""numpy's types of the datatypes with elements of one size."""
TEXT = "BYTES"
LENGTH_BYTES = 4
MAX_DIMENSIONS = 8

_NESTED = re.compile(rb"\s*\[\s*\[")
_NAMED = {"array": "a list", "object": "an object"}
_around = msgspec.json.Decoder(tuple[Raw])
_row = msgspec.json.Decoder(list[str | int | float | bool | None])
"""Stops at the first element that is no single value: lists in lists would take long to make."""


def _limits(code: str) -> tuple[float, float]:
    if code[1] == "f":
        return float(np.finfo(code).min), float(np.finfo(code).max)
    return int(np.iinfo(code).min), int(np.iinfo(code).max)


_LIMITS = {name: _limits(code) for name, code in NUMBERS.items() if name != "BOOL"}
"""The least and the largest element of each datatype of numbers; JSON has integers of any size."""


@dataclass(frozen=True)
class Tensor:
    """One input. values: its elements in row-major order: text, int, float or bool."""

    name: str
    datatype: str
    values: list[Any]


def is_integral(datatype: str) -> bool:
    return NUMBERS.get(datatype, "")[1:2] in ("i", "u")


def from_json(name: str, datatype: str, shape: Sequence[int], data: Raw) -> Tensor:
    """A tensor whose data is a JSON array, flat or nested as the shape. Raises RequestError, which names the tensor."""
    _require_one_row(name, shape)
    for _ in shape[1:]:  # each dimension before the last is a list around the row
        if not _NESTED.match(data):
            break
        try:
            (data,) = _around.decode(data)
        except (msgspec.ValidationError, RecursionError):
            raise invalid(name, f"{name}: its data is not nested as shape {list(shape)} says") from None
    try:
        values = _row.decode(data)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$")
        found = re.search("got `(array|object)`", problem if at else "")
        problem = f"an element of {datatype} cannot be {_NAMED[found[1]]}" if found else in_words(problem)
        raise invalid(name, f"{name}{at.rstrip('`')}: {problem}") from None
    except UnicodeDecodeError as error:  # what a Raw holds was looked at for its brackets alone
        raise invalid(name, f"{name}: an element is not UTF-8: {error.reason}") from None
    return from_values(name, datatype, shape, values)


def from_values(name: str, datatype: str, shape: Sequence[int], data: list[Any]) -> Tensor:
    """A tensor of these elements. Raises RequestError, which names the tensor."""
    require_count(name, shape, len(data))
    kinds: tuple[type, ...] = (str,)
    if datatype == "BOOL":
        kinds = (bool,)
    elif datatype != TEXT:
        kinds = (int,) if is_integral(datatype) else (int, float)
    if not set(map(type, data)) <= set(kinds):
        at = next(at for at, value in enumerate(data) if type(value) not in kinds)
        found = type(data[at]).__name__
        raise invalid(name, f"{name}[{at}]: an element of {datatype} cannot be a {found}")
    if limits := _LIMITS.get(datatype):
        low, high = limits
        if data and not (low <= min(data) and max(data) <= high):
            at = next(at for at, value in enumerate(data) if not low <= value <= high)
            raise invalid(name, f"{name}[{at}]: is beyond what an element of {datatype} can hold")
    return Tensor(name, datatype, data)


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> Tensor:
    """A tensor in the binary form. Raises RequestError, which names the tensor."""
    if datatype == TEXT:
        values = _texts(name, data, math.prod(shape))
        require_count(name, shape, len(values))
        return Tensor(name, datatype, values)
    dtype = np.dtype(NUMBERS[datatype])
    if len(data) % dtype.itemsize:
        raise invalid(name, f"{name}: {len(data)} bytes are no whole number of elements of {datatype}")
    require_count(name, shape, len(data) // dtype.itemsize)
    if datatype == "BOOL":  # any byte but 0 is true
        return Tensor(name, datatype, (np.frombuffer(data, np.uint8) != 0).tolist())
    return Tensor(name, datatype, np.frombuffer(data, dtype).tolist())


def to_bytes(datatype: str, values: Sequence[Any]) -> bytes:
    """The binary form of the elements of a tensor."""
    if datatype != TEXT:
        return np.asarray(values, NUMBERS[datatype]).tobytes()
    encoded = [value.encode() for value in values]
    return b"".join(part for text in encoded for part in (len(text).to_bytes(LENGTH_BYTES, "little"), text))


def _texts(name: str, data: memoryview, count: int) -> list[str]:
    """The elements of BYTES. Raises RequestError for more than there should be, after these."""
    values: list[str] = []
    at, size = 0, len(data)
    try:
        while at < size:
            if len(values) == count:
                raise invalid(name, f"{name}: its data has more elements than its shape says, {count}")
            start = at + LENGTH_BYTES
            at = start + int.from_bytes(data[at:start], "little")
            if start > size or at > size:
                raise invalid(name, f"{name}[{len(values)}]: its bytes end before the element does")
            values.append(str(data[start:at], "utf-8"))
    except UnicodeDecodeError:
        text(f"{name}[{len(values)}]", bytes(data[start:at]))  # says so
    return values


def text(field: str, data: bytes) -> str:
    """An element of BYTES as text. Raises RequestError, which names the field."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(field, f"{field}: {quoted(data.decode(errors='replace'))} is not UTF-8") from None


def require_count(name: str, shape: Sequence[int], count: int) -> None:
    """Raise RequestError, which names the tensor, unless its shape is that of one request with so many elements."""
    if math.prod(shape) != count:
        raise invalid(
            name, f"{name}: its data has {count} elements, which is not what shape {list(shape)} says"
        )
    _require_one_row(name, shape)


def _require_one_row(name: str, shape: Sequence[int]) -> None:
    if any(size != 1 for size in shape[:-1]):  # its rows are of several users, and would be taken for one's
        count = math.prod(shape)
        raise invalid(
            name,
            f"{name}: shape {list(shape)} is that of several requests; one has [{count}] or [1, {count}]",
        )
