# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and prompts against a naive join of dictionary look-ups."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.config import PromptConfig
from jgr.prompt.tokens import PromptBuilder, PromptError, Tokenizer, level_tokens, semantic_id_tokenizer

WORDS = ("<unk>", "<bos>", "<sid>", "<x1>", "<x2>", "<y1>", "buy", "red", "blue", "x:red", "4", "0.5")
CATALOG = Catalog.build(
    ["p", "q", "r"],
    [["<x2>", "<y1>"], ["<x1>", "<y1>"], ["<x2>", "<y1>"]],
    [
        {"title": "red blue", "price": 4, "tag": "x"},
        {"title": "blue", "price": 0.5, "tag": True},
        {"title": "red", "price": 4, "note": ""},
    ],
)


def word_tokenizer(*, unknown: str | None = None) -> Tokenizer:
    """Words between spaces, ids in the order of WORDS, counted from 10."""
    vocabulary = {word: i + 10 for i, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown or "<none>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([word for word in WORDS if word.startswith("<")])
    return Tokenizer(inner)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) + 10 for word in text.split()]


def builder(template: str, item: str, max_items: int = 50, catalog: Catalog = CATALOG) -> PromptBuilder:
    return PromptBuilder(PromptConfig(template, item, max_items), word_tokenizer(), catalog)


def test_our_tokenizer_numbers_the_symbols_level_by_level(tmp_path: Path) -> None:
    tokenizer = semantic_id_tokenizer(CATALOG)
    order = ["<pad>", "<bos>", "<sid>", "<x1>", "<x2>", "<y1>"]
    assert [tokenizer.token_id(name) for name in order] == list(range(6)) and tokenizer.vocab_size == 6
    assert tokenizer.token_id("<x3>") is None and tokenizer.unknown_id is None
    assert tokenizer.encode("<bos><x2> <y1><sid>") == [1, 4, 5, 2] and tokenizer.encode("") == []
    with pytest.raises(PromptError, match="cannot encode"):
        tokenizer.encode("<bos>hello")
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.encode("<bos><x2> <y1><sid>") == [1, 4, 5, 2] and again.vocab_size == 6


def test_a_symbol_of_two_levels_is_one_token() -> None:
    catalog = Catalog.build(["p", "q"], [["5", "7"], ["6", "5"]], [{}, {}])
    tokenizer = semantic_id_tokenizer(catalog)
    assert [t.tolist() for t in level_tokens(catalog, tokenizer, 6)] == [[3, 4], [3, 5]]
    assert tokenizer.vocab_size == 6


def test_our_tokenizer_refuses_token_ids_and_reserved_names() -> None:
    with pytest.raises(PromptError, match="gives token ids"):
        semantic_id_tokenizer(Catalog.build(["p"], [[3]], [{}]))
    with pytest.raises(PromptError, match="'<sid>' as a symbol, which is reserved"):
        semantic_id_tokenizer(Catalog.build(["p"], [["<sid>"]], [{}]))


def test_level_tokens_by_name_and_by_number() -> None:
    tokens = level_tokens(CATALOG, word_tokenizer(), 22)
    assert [t.tolist() for t in tokens] == [[13, 14], [15]] and tokens[0].dtype == np.int32
    numbers = Catalog.build(["p", "q"], [[30, 9], [20, 9]], [{}, {}])
    assert [t.tolist() for t in level_tokens(numbers, None, 31)] == [[20, 30], [9]]
    with pytest.raises(PromptError, match="level 0: 30 is token 30, the model has only 30"):
        level_tokens(numbers, None, 30)
    with pytest.raises(PromptError, match="level 1: '<y1>' is token 15, the model has only 15"):
        level_tokens(CATALOG, word_tokenizer(), 15)
    with pytest.raises(PromptError, match=r"level 0: '<x1>' is not a token.*need a tokenizer"):
        level_tokens(CATALOG, None, 99)
    other = Catalog.build(["p"], [["<x3>"]], [{}])
    with pytest.raises(
        PromptError, match=r"level 0: '<x3>' is not a token of the tokenizer; nearest: '<x[12]>'"
    ):
        level_tokens(other, word_tokenizer(), 99)


def test_a_prompt_by_hand() -> None:
    prompts = builder("<bos> buy {history}<sid>", "{title} {sid} 4", max_items=2)
    assert prompts.prefix.tolist() == ids("<bos> buy") and prompts.suffix.tolist() == ids("<sid>")
    assert prompts.item_tokens(0).tolist() == ids("red blue <x2> <y1> 4")
    prompt = prompts.build(np.array([2, 1, 0], np.int32))
    assert prompt.tolist() == ids("<bos> buy blue <x1> <y1> 4 red blue <x2> <y1> 4 <sid>")
    assert prompt.dtype == np.int32
    assert prompts.build(np.zeros(0, np.int32)).tolist() == ids("<bos> buy <sid>")
    assert prompts.max_tokens == 2 + 2 * 5 + 1
    assert prompts.largest_token == max(ids("4"))


TEMPLATES = st.lists(st.sampled_from(["<bos>", " buy ", " red ", " 4 "]), max_size=3).map("".join)
ITEM_PARTS = st.sampled_from(["{sid}", " {title} ", " {price} ", "<sid>", " buy ", " x:{title} "])


@given(
    TEMPLATES,
    TEMPLATES,
    st.lists(ITEM_PARTS, min_size=1, max_size=5).map("".join),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(1, 6),
)
def test_prompts_equal_a_naive_join(
    before: str, after: str, item: str, rows: list[int], max_items: int
) -> None:
    # "x:red" is one word, so a field must be tokenised together with the text that touches it.
    catalog = Catalog.build(
        CATALOG.item_ids,
        [["<x2>", "<y1>"], ["<x1>", "<y1>"], ["<x2>", "<y1>"]],
        [{**fields, "title": title} for fields, title in zip(CATALOG.metadata, ["red"] * 3, strict=True)],
    )
    prompts = builder(before + "{history}" + after, item, max_items, catalog)
    sids = ["<x2> <y1>", "<x1> <y1>", "<x2> <y1>"]
    naive = ids(before.replace("<bos>", " <bos> "))
    for row in rows[-max_items:]:
        text = item.replace("{sid}", f" {sids[row]} ").replace("<sid>", " <sid> ")
        naive += ids(text.replace("{title}", "red").replace("{price}", str(catalog.metadata[row]["price"])))
    naive += ids(after.replace("<bos>", " <bos> "))
    prompt = prompts.build(np.array(rows, np.int32))
    assert prompt.tolist() == naive
    assert len(prompt) <= prompts.max_tokens and max(naive, default=0) <= prompts.largest_token


def test_token_ids_need_no_tokenizer_where_there_is_no_text() -> None:
    catalog = Catalog.build(["p", "q"], [[30, 9], [20, 9]], [{}, {}])
    prompts = PromptBuilder(PromptConfig("{history}"), None, catalog)
    assert prompts.build(np.array([1, 0, 1], np.int32)).tolist() == [20, 9, 30, 9, 20, 9]
    for template, item in [("<bos>{history}", "{sid}"), ("{history}", "{sid},"), ("{history}", "{title}")]:
        with pytest.raises(PromptError, match="needs a tokenizer"):
            PromptBuilder(PromptConfig(template, item), None, catalog)


@pytest.mark.parametrize(
    ("template", "item", "reason"),
    [
        (
            "<bso>{history}",
            "{sid}",
            "prompt.template: '<bso>' is not a token of the tokenizer; nearest: '<bos>'",
        ),
        ("sell {history}", "{sid}", "prompt.template: 'sell ': the tokenizer cannot encode"),
        ("{history}{user}", "{sid}", "prompt.template: unknown placeholder {user}"),
        ("{history}{", "{sid}", "prompt.template: Single '{'"),
        ("{{}} {history}", "{sid}", "prompt.template: '{} '"),
        ("{history}{{history}}", "{sid}", "exactly once"),
        ("{history}", "{titel}", "prompt.item: unknown placeholder {titel}; nearest: {title}"),
        ("{history}", "{zzz}", "prompt.item: unknown placeholder {zzz}; known: note, price, sid, tag, title"),
        ("{history}", "{title!r}", "prompt.item: a placeholder is a plain name"),
        ("{history}", "{price:.2f}", "prompt.item: a placeholder is a plain name"),
        ("{history}", "{}", "prompt.item: a placeholder is a plain name"),
        ("{history}", "{note}{sid}", "prompt.item: item 'p' has no metadata field 'note'"),
        ("{history}", "{tag}", "prompt.item: metadata field 'tag' of item 'q' is neither text nor a number"),
        ("{history}", "is {title}", "prompt.item: item 'p': the tokenizer cannot encode"),
        ("{history}", "<x9>{title}", "prompt.item: '<x9>' is not a token"),
        ("{history}", "", "prompt.item: '' gives no token for item 'p'"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(template: str, item: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        builder(template, item)


def test_unknown_words_are_the_unknown_token_in_metadata_only() -> None:
    tokenizer = word_tokenizer(unknown="<unk>")
    catalog = Catalog.build(["p"], [["<x1>"]], [{"title": "red green"}])
    prompts = PromptBuilder(PromptConfig("{history}", "{title}"), tokenizer, catalog)
    assert prompts.item_tokens(0).tolist() == ids("red <unk>")
    with pytest.raises(
        PromptError, match=r"prompt.template: 'green ' holds text that the tokenizer does not"
    ):
        PromptBuilder(PromptConfig("green {history}"), tokenizer, catalog)


def test_a_tokenizer_file_that_truncates_and_pads_does_neither_here(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.enable_truncation(2)
    inner.enable_padding(length=5)
    inner.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "t.json")
    assert tokenizer.encode("a b a b") == [0, 7, 0, 7] and tokenizer.encode("b") == [7]
    assert tokenizer.vocab_size == 8


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": 3}', b"[" * 100_000])
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(PromptError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(PromptError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "none.json")
    with pytest.raises(PromptError, match="vocabulary is empty"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))


@pytest.mark.data("amazon-industrial-minionerec")
def test_amazon_industrial_histories(dataset: Path) -> None:
    catalog = load_catalog(dataset / "index.json.gz")
    tokenizer = semantic_id_tokenizer(catalog)
    assert tokenizer.vocab_size == 3 + 48 + 256 + 256
    prompts = PromptBuilder(PromptConfig(max_items=10), tokenizer, catalog)
    rows = np.random.default_rng(0).integers(0, catalog.n_items, 30).astype(np.int32)
    names: list[Any] = [catalog.symbols[lv][catalog.codes[row, lv]] for row in rows[-10:] for lv in range(3)]
    assert prompts.build(rows).tolist() == tokenizer.encode("<bos>" + "".join(names))
    assert prompts.max_tokens == 31


def test_a_separator_stands_between_items_only() -> None:
    catalog = Catalog.build(["x", "y"], [["<a_0>"], ["<a_1>"]], [{}, {}])
    tokenizer = semantic_id_tokenizer(catalog)
    sid, x, y = (tokenizer.token_id(name) for name in ("<sid>", "<a_0>", "<a_1>"))
    prompts = PromptBuilder(
        PromptConfig(template="{history}<bos>", separator="<sid>", max_items=3), tokenizer, catalog
    )
    assert prompts.build(np.array([0, 1, 0, 0], np.int32)).tolist() == [y, sid, x, sid, x, 1]
    assert prompts.build(np.array([1], np.int32)).tolist() == [y, 1]
    assert prompts.build(np.array([], np.int32)).tolist() == [1]
    assert prompts.item_tokens(1).tolist() == [y] and prompts.max_tokens == 6


def test_texts_of_others_hold_no_added_token_even_one_that_is_not_special() -> None:
    letters = {letter: n for n, letter in enumerate(" <_>abcdego12")}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    inner.add_tokens(["<a_1>", "<b_2>"])
    inner.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(inner)
    text = "good <a_1><b_2>"
    assert tokenizer.encode(text)[-2:] == [tokenizer.token_id("<a_1>"), tokenizer.token_id("<b_2>")]
    (found,) = tokenizer.encode_untrusted([text])
    assert found == [letters[letter] for letter in text], "spelt out, as any text is"
