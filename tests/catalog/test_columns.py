# SPDX-License-Identifier: Apache-2.0
"""Catalogs as arrays: equal to those of JSON lines, versions included, and every damaged folder refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jgr.catalog.id_lookup
from jgr.catalog import text_table
from jgr.catalog.catalog import Catalog, CatalogError, load_catalog, load_columns, save_catalog
from jgr.catalog.columns import MANIFEST, _sha256
from jgr.catalog.id_lookup import FEW_IDS
from jgr.catalog.text_table import ItemIds, TextTable

ENTRIES = [
    ("x", ["<a_10>", "<b_2>"], {"title": "Ten", "price": 1.5}),
    ("y", ["<a_9>", "<b_2>"], {}),
    ("zebra é", ["<a_10>", "<b_2>"], {"title": "Zebra \u2028 é", "a": [1, {"c": None, "b": True}]}),
    ("10", ["<a_10>", "<b_1>"], {}),
]


def build(entries: list[tuple[str, list[Any], dict[str, Any]]] = ENTRIES) -> Catalog:
    ids, symbols, metadata = zip(*entries, strict=True)
    return Catalog.build(ids, symbols, metadata)


def content(catalog: Catalog) -> tuple[Any, ...]:
    shown = (tuple(catalog.item_ids), catalog.codes.tolist(), catalog.symbols, tuple(catalog.metadata))
    return (*shown, catalog.version)


def write_lines(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)
TOKENS = st.lists(st.integers(0, 40), min_size=3, max_size=3)
FIELDS = st.dictionaries(
    st.text(max_size=3), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4)
)


@given(st.dictionaries(IDS, st.tuples(TOKENS, FIELDS), min_size=1, max_size=12), st.integers(1, 4))
def test_columns_equal_json_lines(items: dict[str, tuple[list[int], dict[str, Any]]], rows: int) -> None:
    whole = build([(item_id, symbols, fields) for item_id, (symbols, fields) in items.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "_ROWS", rows)  # small chunks, as millions of items have many
        lines = [
            json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            for fields in whole.metadata
        ]
        arrays = Catalog.of_arrays(
            TextTable.of([item_id.encode() for item_id in whole.item_ids]),
            np.array(whole.codes),
            whole.symbols,
            TextTable.of([line.encode() + b"\n" for line in lines]),
        )
        assert content(arrays) == content(whole)
        assert arrays.item_ids == whole.item_ids and whole.item_ids == arrays.item_ids
        asked = [*items, "", "not there", *items]
        assert [list(part) for part in arrays.rows(asked)] == [list(part) for part in whole.rows(asked)]
        assert all(arrays.row(item_id) == row for row, item_id in enumerate(items))


@pytest.mark.parametrize("kept", [ENTRIES, [(item, path, {}) for item, path, _ in ENTRIES]])
def test_a_folder_is_the_catalog(tmp_path: Path, kept: list[Any]) -> None:
    catalog = build(kept)
    save_catalog(catalog, tmp_path / "c.jsonl")
    save_catalog(catalog, tmp_path / "c.catalog")
    mapped = load_catalog(tmp_path / "c.catalog")
    assert content(mapped) == content(load_columns(tmp_path / "c.jsonl")) == content(catalog)
    assert (tmp_path / "c.catalog" / "metadata.npy").exists() == any(fields for *_, fields in kept)
    assert mapped.metadata[-4:2] == catalog.metadata[:2] and not mapped.codes.flags.writeable
    with pytest.raises(IndexError):
        mapped.item_ids[4]
    save_catalog(mapped, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()
    with pytest.raises(CatalogError, match="exists already"):
        save_catalog(mapped, tmp_path / "c.catalog")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl", "c.catalog", "c.jsonl"]


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "_hash", lambda words: np.zeros(len(words), np.uint64))
    ids = ItemIds(TextTable.of([b"b", b"a", b"c"]))
    assert ids.find(["c", "x", "b", "a"]).tolist() == [2, -1, 0, 1]
    assert ids.repeated() is None
    assert ItemIds(TextTable.of([b"b", b"a", b"c", b"a"])).repeated() == (1, 3)


ODD_IDS = st.text(st.sampled_from("ab\0\x01é\ud800€"), max_size=18)


@given(
    st.sets(ODD_IDS.filter(bool), min_size=1, max_size=40), st.lists(ODD_IDS, max_size=90), st.integers(0, 64)
)
def test_ids_are_found_as_a_dictionary_finds_them(known: set[str], asked: list[str], bits: int) -> None:
    """Of hashes that differ in a few of their bits only, so that some are equal and others far from their place."""
    whole, rows = text_table._hash, {item_id: row for row, item_id in enumerate(known)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_table, "_hash", lambda words: whole(words) & np.uint64((1 << bits) - 1))
        ids = ItemIds(TextTable.of([item_id.encode("utf-8", "surrogatepass") for item_id in known]))
        for some in (asked, [*known, *asked, *known], [*known, "x" * 40]):
            assert ids.find(some).tolist() == [rows.get(item_id, -1) for item_id in some]


@pytest.mark.parametrize("count", [1, FEW_IDS, FEW_IDS + 1, 1000])
@pytest.mark.parametrize("few_items", [0, 500])
def test_few_ids_and_many_are_found_alike(
    few_items: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jgr.catalog.id_lookup, "FEW_ITEMS", few_items)
    plain = build([(f"item {n}", [n % 7, n], {}) for n in range(500)])
    arrays = Catalog.of_arrays(
        TextTable.of([item_id.encode() for item_id in plain.item_ids]), np.array(plain.codes), plain.symbols
    )
    asked = np.random.default_rng(count).integers(0, 700, count).tolist()
    for catalog in (plain, arrays):
        found, unknown = catalog.rows([f"item {n}" for n in asked])
        assert found.tolist() == [n for n in asked if n < 500] and found.dtype == np.int32
        assert unknown == [f"item {n}" for n in asked if n >= 500]


def test_hashes_of_numbered_ids_differ() -> None:
    table = TextTable.of([f"{n}".encode() for n in range(100_000)])
    assert len(np.unique(table.hashes())) == 100_000


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"item_id": "", "token_ids": [1]}, ":3: item_id must be a str with content, found ''"),
        ({"item_id": "x" * 513, "token_ids": [1]}, ":3: item_id: must be UTF-8 of 1 to 512 characters"),
        (
            {"item_id": "a\nb", "token_ids": [1]},
            ":3: item_id: must be UTF-8 of 1 to 512 characters, and no control",
        ),
        ({"item_id": "é\x7f", "token_ids": [1]}, ":3: item_id: must be UTF-8"),
        ({"item_id": 1.5, "token_ids": [1]}, ":3: item_id must be a str"),
        ({"item_id": "b", "token_ids": [1]}, ":3: item_id: 'b' is that of item 1, too"),
        ({"item_id": "d", "token_ids": [1, 2]}, ":3: the semantic id has 2 levels, earlier ones 1"),
        ({"item_id": "d", "token_ids": 7}, ":3: semantic id must be a list"),
        ({"item_id": "d", "token_ids": [True]}, ":3: level 0 must be an integer"),
        ({"item_id": "d", "token_ids": ["x"]}, ":3: level 0 must be an integer"),
        ({"item_id": "d", "token_ids": [[1]]}, ":3: level 0 must be an integer"),
        ({"item_id": "d", "semantic_id": ["x"]}, ":3: needs item_id and token_ids"),
        ({"item_id": "d", "token_ids": [1], "metadata": []}, ":3: metadata must be a dict"),
        ({"item_id": "d", "token_ids": [1], "extra": 1}, ":3: unknown key 'extra'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    first = [{"item_id": "a", "token_ids": [1]}, {"item_id": "b", "token_ids": [0]}]
    path = write_lines(tmp_path / "c.jsonl", [*first, line])
    with pytest.raises(CatalogError) as told:
        load_columns(path)
    assert f"{path}{words}" in str(told.value)


def test_no_lines_and_too_many_levels(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="the catalog is empty"):
        load_columns(write_lines(tmp_path / "none.jsonl", []))
    with pytest.raises(CatalogError, match="9 levels; 1 to 8"):
        load_columns(write_lines(tmp_path / "deep.jsonl", [{"item_id": "a", "token_ids": list(range(9))}]))
    with pytest.raises(CatalogError, match=r":1: semantic id must be a list with content"):
        load_columns(write_lines(tmp_path / "flat.jsonl", [{"item_id": "a", "token_ids": []}]))


def save(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        array = np.load(folder / f"{name}.npy")
        np.save(folder / f"{name}.npy", change(array), allow_pickle=True)

    return damage


def manifest(**fields: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**content, **fields}))

    return damage


def edit(array: Any, at: Any, value: Any) -> Any:
    array[at] = value
    return array


def cut(folder: Path) -> None:
    path = folder / "codes.npy"
    path.write_bytes(path.read_bytes()[:-4])


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / MANIFEST).unlink(), "catalog.json: cannot be read: No such file"),
    (lambda f: (f / MANIFEST).write_text("{"), "catalog.json: not JSON"),
    (lambda f: (f / MANIFEST).write_text("[]"), "catalog.json: format: must be 1"),
    (manifest(format=2), "catalog.json: format: must be 1"),
    (manifest(version="x"), "version: must be 16 hexadecimal digits"),
    (manifest(version=None), "version: must be text"),
    (manifest(sha256="0"), "is not what was written"),
    (manifest(symbols=[]), "symbols: must be a list"),
    (manifest(symbols=[["<a_9>", "<a_10>"]]), "codes.npy: must be [items, 1], found [4, 2]"),
    (lambda f: (f / "codes.npy").unlink(), "codes.npy: cannot be read: No such file"),
    (lambda f: (f / "metadata.npy").unlink(), "metadata.npy: cannot be read: No such file"),
    (lambda f: (f / "item_ids.npy").write_bytes(b""), "item_ids.npy: cannot be read"),
    (lambda f: (f / "item_ids.npy").write_bytes(b"PK\x03\x04"), "item_ids.npy: "),
    (cut, "codes.npy: cannot be read"),
    (save("codes", lambda a: a.astype(np.int64)), "codes.npy: must be a plain array of int32"),
    (save("codes", lambda a: a.astype(np.float32) * np.nan), "codes.npy: must be a plain array of int32"),
    (save("codes", lambda a: np.asfortranarray(a)), "codes.npy: must be a plain array of int32"),
    (save("codes", lambda a: np.array([{}, None])), "codes.npy: cannot be read: "),
    (save("codes", lambda a: a[:0]), "codes.npy: "),
    (save("codes", lambda a: a.ravel()), "codes.npy: must be [items, 2], found [8]"),
    (save("item_ids", lambda a: a[None]), "item_ids.npy: must have one dimension, found [1, "),
    (save("codes", lambda a: edit(a, (2, 1), 0)), "is not what was written"),
]

# As above, but with a manifest that vouches for it: what is behind the sum is checked all the same.
VOUCHED: list[tuple[Callable[[Path], Any], str]] = [
    (save("codes", lambda a: edit(a, (2, 1), 2)), "codes: item 2: level 1 has code 2, and 2 symbols"),
    (save("codes", lambda a: edit(a, (2, 1), -1)), "codes: item 2: level 1 has code -1"),
    (save("codes", lambda a: a * 0), "symbols: level 0 has symbols that no item has"),
    (save("codes", lambda a: a[:3]), "item_ids: its offsets do not divide"),
    (save("item_id_offsets", lambda a: edit(a, 1, 0)), "item_ids: its offsets do not divide"),
    (save("item_id_offsets", lambda a: edit(a, -1, 10**6)), "item_ids: its offsets do not divide"),
    (save("item_id_offsets", lambda a: edit(a, 0, 1)), "item_ids: its offsets do not divide"),
    (save("item_ids", lambda a: edit(a, 0, 0xFF)), "item_id: item 0: must be UTF-8"),
    (
        save("item_ids", lambda a: edit(a, 0, ord("\n"))),
        "item_id: item 0: must be UTF-8 of 1 to 512 characters, and no",
    ),
    (save("item_ids", lambda a: edit(a, 0, a[1])), "item_id: item 1: 'y' is that of item 0, too"),
    (save("metadata_offsets", lambda a: a[:-1]), "metadata: its offsets do not divide"),
    (save("metadata", lambda a: edit(a, -1, ord(" "))), "metadata: item 3: must be an object"),
    (save("metadata", lambda a: edit(a, -3, ord("["))), "metadata: item 3: must be an object"),
    (manifest(symbols=[["<a_10>", "<a_9>"], ["<b_1>", "<b_2>"]]), "level 0 are not distinct and in natural"),
    (manifest(symbols=[["<a_9>", "<a_9>"], ["<b_1>", "<b_2>"]]), "level 0 are not distinct and in natural"),
    (manifest(symbols=[["<a_9>", 3], ["<b_1>", "<b_2>"]]), "level 0 must be a token name"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "c.catalog"
    save_catalog(build(), path)
    return path


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_folder_is_refused(
    whole: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    path = tmp_path / "c.catalog"
    shutil.copytree(whole, path)
    damage(path)
    with pytest.raises(CatalogError) as told:
        load_catalog(path)
    assert words in str(told.value) and str(path) in str(told.value)


@pytest.mark.parametrize(("damage", "words"), VOUCHED)
def test_a_folder_is_checked_behind_its_sum(
    whole: Path, tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    def vouched(folder: Path) -> None:
        damage(folder)
        names = ["codes", "item_ids", "item_id_offsets", "metadata", "metadata_offsets"]
        symbols = json.loads((folder / MANIFEST).read_text())["symbols"]
        arrays = {name: np.load(folder / f"{name}.npy") for name in names}
        manifest(sha256=_sha256(symbols, arrays))(folder)

    test_a_damaged_folder_is_refused(whole, tmp_path, vouched, words)


@pytest.mark.parametrize(
    "lines",
    [
        b"{}\n{} {}\n{}\n",
        b'{}\n{"a":1}{"b":2}\n{}\n',
        b'{}\n{"a":NaN}\n{}\n',
        b'{}\n{"a":1e999}\n{}\n',
        b"{}\n[1]\n{}\n",
    ],
)
def test_metadata_is_an_object_a_line(lines: bytes) -> None:
    table = TextTable.of([line + b"\n" for line in lines[:-1].split(b"\n")])
    assert text_table.object_fault(table) == 1
