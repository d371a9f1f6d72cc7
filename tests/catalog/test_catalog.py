# SPDX-License-Identifier: Apache-2.0
"""The catalog: codes and versions by hand, round trips, and every malformed file refused by name."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.catalog import Catalog, CatalogError, load_catalog, save_catalog

SMALL = [
    ("x", ["<a_10>", "<b_2>"], {"title": "Ten", "price": 1.5}),
    ("y", ["<a_9>", "<b_2>"], {}),
    ("z", ["<a_10>", "<b_2>"], {"title": "Zebra \u2028 é"}),
]


def build(entries: list[tuple[str, list[Any], dict[str, Any]]]) -> Catalog:
    ids, symbols, metadata = zip(*entries, strict=True)
    return Catalog.build(ids, symbols, metadata)


def content(catalog: Catalog) -> tuple[Any, ...]:
    return (catalog.item_ids, catalog.codes.tolist(), catalog.symbols, catalog.metadata, catalog.version)


def test_codes_count_the_symbols_that_occur_in_natural_order() -> None:
    catalog = build(SMALL)
    assert catalog.symbols == (("<a_9>", "<a_10>"), ("<b_2>",))
    assert catalog.codes.tolist() == [[1, 0], [0, 0], [1, 0]] and catalog.codes.dtype == np.int32
    assert (catalog.depth, catalog.n_items, catalog.level_sizes) == (2, 3, (2, 1))
    assert catalog.metadata[0] == {"title": "Ten", "price": 1.5}
    full = build([(str(i), [f"<a_{i}>"], {}) for i in range(255, -1, -1)])
    assert full.codes[:, 0].tolist() == list(range(255, -1, -1))
    tokens = build([("p", [300, 7], {}), ("q", [20, 7], {}), ("r", [1000, 8], {})])
    assert tokens.symbols == ((20, 300, 1000), (7, 8))
    assert tokens.codes.tolist() == [[1, 0], [0, 0], [2, 1]]


def test_symbols_that_differ_only_in_leading_zeros_stay_apart() -> None:
    catalog = build([("p", ["t1"], {}), ("q", ["t01"], {}), ("r", ["t1x"], {}), ("s", ["t"], {})])
    assert set(catalog.symbols[0]) == {"t1", "t01", "t1x", "t"}
    assert catalog.symbols[0][0] == "t"


def test_rows_keeps_order_and_repeats_and_lists_the_unknown() -> None:
    catalog = build(SMALL)
    rows, unknown = catalog.rows(["z", "no", "x", "z", "nor this"])
    assert rows.tolist() == [2, 0, 2] and rows.dtype == np.int32
    assert unknown == ["no", "nor this"]
    assert catalog.rows([])[0].tolist() == [] and catalog.rows(["y"])[1] == []
    assert catalog.row("y") == 1 and catalog.row("") is None


def test_the_version_is_the_hash_of_the_content_not_of_the_file(tmp_path: Path) -> None:
    catalog = build(SMALL)
    save_catalog(catalog, tmp_path / "c.jsonl")
    save_catalog(catalog, tmp_path / "c.jsonl.gz")
    digest = hashlib.sha256((tmp_path / "c.jsonl").read_bytes()).hexdigest()
    assert catalog.version == digest[:16]
    index = {item_id: symbols for item_id, symbols, _ in SMALL}
    (tmp_path / "index.json").write_text(json.dumps(index, indent=1))
    items = {item_id: dict(reversed(fields.items())) for item_id, _, fields in reversed(SMALL)}
    (tmp_path / "item.json").write_text(json.dumps(items))
    for name in ("c.jsonl", "c.jsonl.gz", "index.json"):
        assert content(load_catalog(tmp_path / name)) == content(catalog)
    others = [
        build(SMALL[::-1]),
        build([*SMALL[:2], ("z", SMALL[2][1], {})]),
        build([*SMALL[:2], ("w", *SMALL[2][1:])]),
        build([*SMALL[:2], ("z", ["<a_9>", "<b_2>"], SMALL[2][2])]),
    ]
    assert len({other.version for other in [catalog, *others]}) == 5


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
IDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=6)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    ids = draw(st.lists(IDS, min_size=1, max_size=8, unique=True))
    symbol = draw(st.sampled_from([NAMES, st.integers(0, 2**31 - 1)]))
    depth = draw(st.integers(1, 8))
    symbols = [draw(st.lists(symbol, min_size=depth, max_size=depth)) for _ in ids]
    return Catalog.build(ids, symbols, [draw(st.dictionaries(NAMES, JSON, max_size=3)) for _ in ids])


@given(catalogs(), st.booleans())
def test_saving_and_loading_gives_the_same_catalog(
    tmp_path_factory: pytest.TempPathFactory, catalog: Catalog, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / ("c.jsonl.gz" if packed else "c.jsonl")
    save_catalog(catalog, path)
    assert content(load_catalog(path)) == content(catalog)


GOOD = '{"item_id": "p", "token_ids": [1, 2], "metadata": {"title": "P"}}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("\ufeff" + GOOD, "not JSON"),
        (GOOD + "x", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "expected an object, found int"),
        ('{"item_id": "q"}', "needs item_id and token_ids"),
        ('{"token_ids": [1, 2]}', "needs item_id and token_ids"),
        ('{"item_id": "q", "semantic_id": ["<a>", "<b>"]}', "one kind in the whole file"),
        ('{"item_id": "q", "token_ids": [1, 2], "semantic_id": ["<a>", "<b>"]}', "one kind"),
        ('{"item_id": "q", "token_ids": [1, 2], "metdata": {}}', "unknown key 'metdata'"),
        ('{"item_id": "p", "token_ids": [1, 2]}', "item_id 'p' is already used at .*:1"),
        ('{"item_id": "", "token_ids": [1, 2]}', "item_id must be 1 to 512 characters, .* found ''"),
        (
            r'{"item_id": "a\nb", "token_ids": [1, 2]}',
            r"item_id must be .* no control characters, found 'a.nb'",
        ),
        (r'{"item_id": "\u007f", "token_ids": [1, 2]}', "item_id must be .* no control characters"),
        ('{"item_id": 1.5, "token_ids": [1, 2]}', "item_id must be .* found 1.5"),
        ('{"item_id": true, "token_ids": [1, 2]}', "item_id must be .* found True"),
        ('{"item_id": "%s", "token_ids": [1, 2]}' % ("q" * 513), "item_id must be 1 to 512 characters"),
        ('{"item_id": "q", "token_ids": [1]}', "has 1 levels, earlier ones 2"),
        ('{"item_id": "q", "token_ids": "12"}', "must be a list, found '12'"),
        (
            '{"item_id": "q", "token_ids": [1, -2]}',
            "level 1 must be an integer from 0 to 2147483647, found -2",
        ),
        ('{"item_id": "q", "token_ids": [2147483648, 2]}', "level 0 must be .* found 2147483648"),
        ('{"item_id": "q", "token_ids": [1, 2.0]}', "level 1 must be .* found 2.0"),
        ('{"item_id": "q", "token_ids": [1, true]}', "level 1 must be .* found True"),
        ('{"item_id": "q", "token_ids": [1, NaN]}', "not JSON"),
        ('{"item_id": "q", "token_ids": [1, [2]]}', r"level 1 must be .* found \[2\]"),
        ('{"item_id": "q", "token_ids": [1, "<b>"]}', "level 1 must be .* found '<b>'"),
        ('{"item_id": "q", "token_ids": [1, 2], "metadata": {"price": NaN}}', "not JSON"),
        ('{"item_id": "q", "token_ids": [1, 2], "metadata": {"price": 1e999}}', "not JSON"),
        ('{"item_id": "q", "token_ids": [1, 2], "metadata": []}', r"metadata must be an object, found \[\]"),
        ('{"item_id": "q", "token_ids": [1, 2], "metadata": null}', "metadata must be an object"),
        ('{"item_id": "q", "token_ids": [1, 2], "metadata": {"t": "%s"}}' % ("é" * 600_000), "longer than"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f"{GOOD}\n{line}\n", "utf-8")
    with pytest.raises(CatalogError, match=f"c.jsonl:2: .*{reason}"):
        load_catalog(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the catalog is empty"),
        (b'{"item_id": "\xff", "token_ids": [1]}\n', "c.jsonl:1: not JSON: .*utf-8"),
        (b'{"item_id": "p", "token_ids": []}\n', "c.jsonl:1: .* has 0 levels; 1 to 8"),
        (b'{"item_id": "p", "token_ids": [1,2,3,4,5,6,7,8,9]}\n', "has 9 levels; 1 to 8"),
        (b'{"item_id": "p", "semantic_id": [1]}\n', "level 0 must be a token name .* found 1"),
        (b'{"item_id": "p", "semantic_id": [""]}\n', "level 0 must be a token name .* found ''"),
        (
            b'{"item_id": 7, "token_ids": [1]}\n{"item_id": "7", "token_ids": [1]}',
            ":2: item_id '7' is already",
        ),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(data)
    with pytest.raises(CatalogError, match=reason):
        load_catalog(tmp_path / "c.jsonl")


def test_integer_item_ids_are_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"item_id": 7, "token_ids": [1]}\n{"item_id": -8, "token_ids": [2]}')
    assert load_catalog(tmp_path / "c.jsonl").item_ids == ("7", "-8")


def test_truncated_gzip_missing_file_and_unknown_name(tmp_path: Path) -> None:
    save_catalog(build([(str(i), [i], {}) for i in range(1000)]), tmp_path / "c.jsonl.gz")
    data = (tmp_path / "c.jsonl.gz").read_bytes()
    (tmp_path / "c.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(CatalogError, match=r"c\.jsonl\.gz: the gzip file is cut short"):
        load_catalog(tmp_path / "c.jsonl.gz")
    with pytest.raises(CatalogError, match=r"no\.jsonl: cannot be read: No such file"):
        load_catalog(tmp_path / "no.jsonl")
    for name in ("c.csv", "c.json", "myindex.json"):
        with pytest.raises(CatalogError, match="a catalog file is named"):
            load_catalog(tmp_path / name)
    with pytest.raises(CatalogError, match="saved as"):
        save_catalog(build(SMALL), tmp_path / "c.json")


def test_the_index_and_item_pair(tmp_path: Path) -> None:
    (tmp_path / "Toys.index.json.gz").write_bytes(gzip.compress(b'{"5": ["<a_1>"], "3": ["<a_0>"]}'))
    bare = load_catalog(tmp_path / "Toys.index.json.gz")
    assert bare.item_ids == ("5", "3") and bare.metadata == ({}, {}) and bare.codes.tolist() == [[1], [0]]
    (tmp_path / "Toys.item.json").write_text('{"3": {"title": "Top"}, "4": {"title": "No id"}}')
    (tmp_path / "item.json").write_text('{"3": {"title": "Another set"}}')
    assert load_catalog(tmp_path / "Toys.index.json.gz").metadata == ({}, {"title": "Top"})


@pytest.mark.parametrize(
    ("index", "items", "reason"),
    [
        (b"{}", None, "the catalog is empty"),
        (b"[]", None, "expected an object, found list"),
        (b'{"1": ["<a>"], "1": ["<b>"]}', None, "key '1' occurs twice"),
        (b'{"1": ["<a>"], "2": ["<b>", "<c>"]}', None, "item '2': .* has 2 levels, earlier ones 1"),
        (b'{"1": [5]}', None, "item '1': level 0 must be a token name"),
        (b'{"1": "<a>"}', None, "item '1': the semantic id must be a list"),
        (b'{"1": ["\xff"]}', None, "not JSON: .*utf-8"),
        (b"[" * 100_000, None, "not JSON"),
        (b'{"1": ["<a>"]}', b'{"2": {}}', "describes none of the items of index.json"),
        (b'{"1": ["<a>"]}', b'{"1": {"price": NaN}}', "item.json: NaN is not a JSON number"),
        (b'{"1": ["<a>"]}', b'{"1": {"price": 1e999}}', "plain, finite JSON"),
        (b'{"1": ["<a>"]}', b'{"1": {"t": "x", "t": "y"}}', "item.json: key 't' occurs twice"),
        (b'{"1": ["<a>"]}', b'{"1": {"t": "\\ud800"}}', "item '1': cannot be written as JSON"),
        (b'{"1": ["<a>"]}', b'{"1": 5}', "item '1': metadata must be an object"),
    ],
)
def test_a_malformed_pair_is_refused(tmp_path: Path, index: bytes, items: bytes | None, reason: str) -> None:
    (tmp_path / "index.json").write_bytes(index)
    if items is not None:
        (tmp_path / "item.json").write_bytes(items)
    with pytest.raises(CatalogError, match=reason):
        load_catalog(tmp_path / "index.json")


@pytest.mark.parametrize(
    ("value", "reason"),
    [(math.nan, "finite"), (math.inf, "finite"), ((1, 2), "plain"), ({1: 2}, "JSON"), (object(), "JSON")],
)
def test_metadata_that_json_cannot_keep_is_refused(value: object, reason: str) -> None:
    with pytest.raises(CatalogError, match=f"item 1: .*{reason}"):
        Catalog.build(["p", "q"], [[1], [2]], [{}, {"field": value}])


def test_build_needs_equally_many_of_everything() -> None:
    with pytest.raises(CatalogError, match="differ in length: 2, 1 and 2"):
        Catalog.build(["p", "q"], [[1]], [{}, {}])
    with pytest.raises(CatalogError, match="empty"):
        Catalog.build([], [], [])


@pytest.mark.data("amazon-industrial-minionerec")
def test_amazon_industrial(dataset: Path, tmp_path: Path) -> None:
    catalog = load_catalog(dataset / "index.json.gz")
    assert catalog.n_items == 3686 and catalog.depth == 3
    # 48 of the first level's 256 codes occur.
    assert catalog.level_sizes == (48, 256, 256)
    assert len(np.unique(catalog.codes, axis=0)) == 3670
    assert catalog.symbols[1] == tuple(f"<b_{i}>" for i in range(256))
    row = catalog.row("1")
    assert row == 1 and catalog.metadata[row]["title"].startswith("Stanley TRA708T Sharpshooter")
    assert [catalog.symbols[level][catalog.codes[row, level]] for level in range(3)] == [
        "<a_42>", "<b_80>", "<c_160>",
    ]  # fmt: skip
    save_catalog(catalog, tmp_path / "industrial.jsonl.gz")
    assert content(load_catalog(tmp_path / "industrial.jsonl.gz")) == content(catalog)
