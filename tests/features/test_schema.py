# SPDX-License-Identifier: Apache-2.0
"""Records byte by byte, what is refused, and features taken from metadata."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from jgr.features.extraction import ExtractionError, derive, extract, misnamed
from jgr.features.schema import Schema, SchemaError

TEXT = "price:float32,flags:uint8[3],genres:int32[2],half:float16"
SCHEMA = Schema.parse(TEXT)


def by_hand(price: float, flags: bytes, genres: tuple[int, int], half: float) -> bytes:
    """16 bytes of header; price at 16, flags at 20, genres at the next multiple of 4, half behind them, 36 in all."""
    header = b"jgr\x01" + hashlib.sha256(TEXT.encode()).digest()[:8] + struct.pack("<I", 36)
    return header + struct.pack("<f3sx2ie2x", price, flags, *genres, half)


def test_records_are_the_bytes_that_the_format_says() -> None:
    columns = {
        "price": np.array([[1.5], [-2.0]]),
        "flags": np.array([[1, 2, 3], [0, 0, 255]]),
        "genres": np.array([[7, -1], [2**31 - 1, 0]]),
        "half": np.array([[0.25], [8.0]]),
    }
    packed = SCHEMA.pack(columns)
    assert packed == [
        by_hand(1.5, b"\1\2\3", (7, -1), 0.25),
        by_hand(-2.0, b"\0\0\xff", (2**31 - 1, 0), 8.0),
    ]
    records = SCHEMA.records([packed[1], SCHEMA.default, packed[0]])
    for name, column in columns.items():
        assert np.array_equal(records[name], np.stack([column[1], np.zeros_like(column[0]), column[0]]))
    assert SCHEMA.default == by_hand(0.0, b"\0\0\0", (0, 0), 0.0)


def test_values_that_are_no_records_are_found() -> None:
    good = SCHEMA.default
    other = Schema.parse(TEXT.replace("price", "cost")).default
    values = [good, good[:-1], None, other, b"", good + b"\0", good]
    assert SCHEMA.faults(values) == [
        (1, "has 35 bytes, a record has 36"),
        (3, "is not a record of this schema"),
        (4, "has 0 bytes, a record has 36"),
        (5, "has 37 bytes, a record has 36"),
    ]


def test_a_record_with_a_number_that_is_not_finite_is_one_fault() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [(1.0, 2.0), (nan, 2.0), (1.0, -inf), (inf, nan), (1e38, -6e4)]
    values = [by_hand(price, b"\1\2\3", (7, -1), half) for price, half in rows]
    assert SCHEMA.faults([None, *values]) == [
        (place, "has a number that is not finite") for place in (2, 3, 4)
    ]
    assert Schema.parse("x:int32").faults([Schema.parse("x:int32").pack({"x": np.array([[-1]])})[0]]) == []


@pytest.mark.parametrize("text", [TEXT, "a.b-c_1:int8", "x:int16[4096]"])
def test_a_schema_is_its_text(text: str) -> None:
    assert str(Schema.parse(text)) == text
    assert Schema.parse(text.replace(",", " , ").replace(":", " : ")) == Schema.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not name:dtype"),
        ("a:float64", "'a:float64' is not name:dtype"),
        ("a:int32[0]", "'a:int32[0]' is not"),
        ("a:int32,", "'' is not"),
        ("a:int32,b:int8,a:int8", "'a' is named twice"),
        ("a:float32[16385]", "65536 are the most"),
    ],
)
def test_a_wrong_schema_is_named(text: str, message: str) -> None:
    with pytest.raises(SchemaError) as raised:
        Schema.parse(text)
    assert message in str(raised.value)


METADATA = [
    {"genres": ["Comedy", "Drama"], "title": "one", "year": 1999, "score": 0.5, "more": {}},
    {"genres": ["Drama"], "title": "two", "year": 2000, "score": 1},
    {"genres": ["Comedy"], "title": "three", "year": None},
]


def category(text: str) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % (2**31 - 2)


def test_a_schema_of_too_many_features_is_refused_and_what_is_quoted_of_one_is_short() -> None:
    with pytest.raises(SchemaError, match=r"^features: there are more than 4096$"):
        Schema.parse(",".join(f"a{at}:int8" for at in range(4097)))
    assert len(Schema.parse(",".join(f"a{at}:int8" for at in range(4096))).features) == 4096
    with pytest.raises(SchemaError) as refused:
        Schema.parse("z" * 3_000_000)
    assert len(str(refused.value)) < 300


def test_features_are_taken_from_metadata() -> None:
    schema = derive(METADATA)
    assert str(schema) == "genres:int32[2],score:float32,year:int32"
    records = schema.records(extract(schema, ["a", "b", "c"], METADATA))
    comedy, drama = category("Comedy"), category("Drama")
    assert records["genres"].tolist() == [[comedy, drama], [drama, 0], [comedy, 0]]
    assert records["score"].tolist() == [[0.5], [1.0], [0.0]]
    assert records["year"].tolist() == [[1999], [2000], [0]]
    assert len({comedy, drama, 0}) == 3


def test_fields_that_a_schema_cannot_name_are_left_out() -> None:
    metadata = [{"release year": 1999, "year": 1999, "1st": 2, "a:b": "x", "a title": "one"}]
    assert str(derive([*metadata, {"a:b": "x"}])) == "year:int32"
    assert misnamed([*metadata, {"a:b": "x"}]) == ["1st", "a:b", "release year"]
    with pytest.raises(SchemaError, match="no feature"):
        derive([{"release year": 1999}])


def test_metadata_without_features_is_refused() -> None:
    with pytest.raises(SchemaError, match="no feature"):
        derive([{"title": "one"}, {"title": "two"}, {}])


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ("x:int8", 128),
        ("x:int32", 1.5),
        ("x:float32", "text"),
        ("x:float16", 1e6),
        ("x:float32", 10**400),
        ("x:int32[2]", [1, {}]),
        ("x:float32", float("nan")),
        ("x:int32", float("inf")),
    ],
)
def test_what_does_not_fit_names_the_item(schema: str, value: object) -> None:
    with pytest.raises(ExtractionError, match=r"item 'b': x: .* does not fit x:"):
        extract(Schema.parse(schema), ["a", "b"], [{}, {"x": value}])
