# SPDX-License-Identifier: Apache-2.0
"""Text to tokens: the tokenizer, the tokens of the catalog's codes, and the prompt of a history.

The one idea: a template's prefix, each item and the suffix are tokenised one by one, so
the tokens of an item never depend on its neighbours. Everything is tokenised at construction into one flat
array; building the prompt of a request is a gather.

- `{sid}` stands for the item's level tokens themselves, not for their text: it needs no text form and cannot
  be split.
- A name in angle brackets in a template must be a token of the tokenizer; byte-level vocabularies would
  otherwise cut `<bos>` into pieces without a word.
- Metadata outside of the vocabulary becomes the tokenizer's unknown token if it has one, else it is an error;
  in fixed text it is always an error.

Letters: n items, t tokens.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from string import Formatter

import numpy as np
import numpy.typing as npt
import tokenizers

from jgr.catalog.catalog import MAX_TOKEN, Catalog
from jgr.config import PromptConfig, UserError
from jgr.fields import one_line
from jgr.files import read_whole, writing
from jgr.prompt.segments import Part

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_PIECES_PER_CALL = 8192


class PromptError(UserError):
    """Template, tokenizer and catalog do not fit together; the message names the field, symbol or item."""


class Tokenizer:
    """A `tokenizer.json` of the tokenizers library, without its own special tokens, truncation and padding.

    vocabulary: token id by token.
    vocab_size: the largest token id + 1.
    unknown_id: the token for text outside of the vocabulary, None where there is no such token.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.vocabulary: Mapping[str, int] = inner.get_vocab(with_added_tokens=True)
        if not self.vocabulary:
            raise PromptError("the tokenizer's vocabulary is empty")
        self.vocab_size = max(self.vocabulary.values()) + 1
        unknown = getattr(inner.model, "unk_token", None)
        self.unknown_id: int | None = self.vocabulary.get(unknown) if isinstance(unknown, str) else None

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        path = Path(path)
        content = read_whole(path, PromptError)
        try:
            inner = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as cause:  # the library raises bare Exception for any text that it cannot parse
            raise PromptError(f"{path}: not a tokenizer.json: {one_line(cause)}") from None
        return cls(inner)

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, atomically."""
        with writing(Path(path), PromptError) as stream:
            stream.write(self._inner.to_str(pretty=True).encode())

    def with_tokens(self, names: Sequence[str]) -> Tokenizer:
        """The same tokenizer with further tokens, in order after all others."""
        inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
        inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
        return Tokenizer(inner)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. PromptError for text that has no tokens, not even the unknown one."""
        try:
            encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as cause:  # likewise bare; WordLevel raises for a word it does not know
            raise PromptError(f"the tokenizer cannot encode the text: {cause}") from None
        return [list(one.ids) for one in encoded]

    def encode_untrusted(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that somebody else wrote: they never hold an added token, whatever the text spells."""
        try:
            encoded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as cause:
            raise PromptError(f"the tokenizer cannot encode the text: {cause}") from None
        return [[token for token in one.ids if token not in self._added] for one in encoded]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        told = json.loads(self._inner.to_str())
        for token in told["added_tokens"]:
            token["special"] = True  # items and marks may have been added as ordinary tokens
        plain = tokenizers.Tokenizer.from_str(json.dumps(told))
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._inner.get_added_tokens_decoder())

    def token_id(self, name: str) -> int | None:
        return self.vocabulary.get(name)

    def nearest(self, name: str) -> str:
        """`; nearest: ...` for an error message, empty where no token looks like `name`."""
        # Names in brackets are few; comparing with a whole text vocabulary would take seconds.
        names = [token for token in self.vocabulary if token[:1] == name[:1] and len(token) < 2 * len(name)]
        found = difflib.get_close_matches(name, names, n=1)
        return f"; nearest: {found[0]!r}" if found else ""


def semantic_id_tokenizer(catalog: Catalog) -> Tokenizer:
    """Our own tokenizer: `<pad>` = 0, `<bos>` = 1, `<sid>` = 2, then every level's symbols in code order.

    A name that occurs in several levels is one token. PromptError for a catalog of token ids: those belong to
    a model that brings its own tokenizer.json.
    """
    vocabulary = {"<pad>": 0, "<bos>": 1, "<sid>": 2}
    reserved = set(vocabulary)
    for level in catalog.symbols:
        for symbol in level:
            if not isinstance(symbol, str):
                raise PromptError(
                    "the catalog gives token ids; use the tokenizer.json of the model they belong to"
                )
            if symbol in reserved:
                raise PromptError(f"the catalog uses {symbol!r} as a symbol, which is reserved")
            vocabulary.setdefault(symbol, len(vocabulary))
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in vocabulary])
    return Tokenizer(inner)


def level_tokens(catalog: Catalog, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[Int32, ...]:
    """Per level [level_size] int32: the model's token of each code.

    PromptError names a symbol that is not a token of the tokenizer, or one whose token is >= vocab_size.
    """
    return tuple(
        _tokens_of(level, symbols, tokenizer, vocab_size) for level, symbols in enumerate(catalog.symbols)
    )


def _tokens_of(
    level: int, symbols: tuple[str | int, ...], tokenizer: Tokenizer | None, vocab_size: int
) -> Int32:
    tokens: list[int] = []
    for symbol in symbols:
        token = symbol if isinstance(symbol, int) else tokenizer.token_id(symbol) if tokenizer else None
        if token is None:
            near = tokenizer.nearest(str(symbol)) if tokenizer else "; token names need a tokenizer"
            raise PromptError(f"catalog level {level}: {symbol!r} is not a token of the tokenizer{near}")
        if token >= vocab_size:
            raise PromptError(
                f"catalog level {level}: {symbol!r} is token {token}, the model has only {vocab_size}"
            )
        tokens.append(token)
    return np.array(tokens, np.int32)


def first_kept(count: int, most: int, stride: int) -> int:
    """The first of `count` items that a prompt keeps: a multiple of stride, and at most `most` from the end."""
    return -(-max(0, count - most) // stride) * stride


class PromptBuilder:
    """The prompt of a history: the template's prefix, the last `max_items` items, the template's suffix.

    prefix, suffix: [t] int32, the template's text before and after `{history}`.
    max_tokens: no prompt is longer. min_item_tokens: no item is shorter.
    review_tokens: the most tokens of an event's own text, which stands where prompt.item has {review}; 0: nowhere.
    largest_token: must be below the model's vocabulary size.
    """

    def __init__(self, config: PromptConfig, tokenizer: Tokenizer | None, catalog: Catalog) -> None:
        """Tokenises the template and every item once. PromptError names the field that does not fit."""
        _, after = _split_template(config.template)
        self.prefix = template_prefix(config, tokenizer)
        self.suffix = encode_template("prompt.template", after, tokenizer)
        self._max_items, self._stride = config.max_items, config.stride
        # Every item's tokens are stored with the separator after them, which `user` takes off the last one.
        separator = encode_fixed("prompt.separator", config.separator, tokenizer)
        texts = _split_at_review(config.item)
        columns = [
            encode_items("prompt.item", text, tokenizer, catalog) for text in texts if text or len(texts) == 1
        ]
        separators = np.tile(separator, catalog.n_items), np.full(catalog.n_items, len(separator), np.int64)
        self._tokens, self._lengths = _interleave([*columns, separators], catalog.n_items)
        # Where an event's own text stands in the tokens of its item.
        self._cut = columns[0][1] if texts[0] else np.zeros(catalog.n_items, np.int64)
        self.review_tokens = config.review_tokens if len(texts) > 1 else 0
        self._separator = len(separator)
        self.min_item_tokens = int(self._lengths.min()) - self._separator
        self._starts = np.cumsum(self._lengths) - self._lengths
        # Items of one length, as nearly all are, stand in rows, so that no index for each token is needed.
        alike = bool((self._lengths == self._lengths[0]).all())
        self._alike = self._tokens.reshape(catalog.n_items, -1) if alike else None
        history = config.max_items * (int(self._lengths.max()) + self.review_tokens) - self._separator
        self.max_tokens = len(self.prefix) + history + len(self.suffix)
        parts = (self.prefix, self._tokens, self.suffix)
        self.largest_token = max(int(part.max(initial=0)) for part in parts)

    def item_tokens(self, row: int) -> Int32:
        """The tokens of one item: [t] int32, a view."""
        return self._tokens[self._starts[row] : self._starts[row] + self._lengths[row] - self._separator]

    def build(self, rows: Int32) -> Int32:
        """The prompt of a history, [t] int32. rows: [h] int32, 0 .. n - 1, oldest first; h may be 0."""
        return np.concatenate((self.user(rows), self.suffix))

    def user(self, rows: Int32) -> Int32:
        """The prompt up to the end of the history, [t] int32."""
        rows = rows[first_kept(len(rows), self._max_items, self._stride) :]
        if self._alike is not None:
            tokens = self._alike.take(rows, axis=0).ravel()
            return np.concatenate((self.prefix, tokens[: max(len(tokens) - self._separator, 0)]))
        lengths = self._lengths[rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        # Token j of the history stands at j + (where its item starts in the table) - (where it starts here).
        source = np.repeat(self._starts[rows] - ends + lengths, lengths) + np.arange(total)
        history = self._tokens[source[: max(total - self._separator, 0)]]
        return np.concatenate((self.prefix, history))

    def user_with(self, rows: Int32, reviews: Sequence[Int32]) -> tuple[Int32, tuple[Part, ...]]:
        """The prompt up to the end of the history, where each event has a text of its own, and what its tokens are.

        reviews: [t] int32 of each event, empty where it has no text; of more than review_tokens the first are kept.
        """
        start = first_kept(len(rows), self._max_items, self._stride)
        pieces, parts = [self.prefix], [Part("instruction", len(self.prefix))]
        for row, review in zip(rows[start:].tolist(), reviews[start:], strict=True):
            first, cut, length = self._starts[row], self._cut[row], self._lengths[row]
            item, text = self._tokens[first : first + length], review[: self.review_tokens]
            pieces += [item[:cut], text, item[cut:]]
            parts += [
                Part("structure", int(cut)),
                Part("review", len(text)),
                Part("structure", int(length - cut)),
            ]
        if len(pieces) > 1 and self._separator:
            pieces[-1] = pieces[-1][: -self._separator]
            parts[-1] = Part("structure", len(pieces[-1]))
        return np.concatenate(pieces), tuple(part for part in parts if part.tokens)


def _split_at_review(item: str) -> list[str]:
    """The text of a history's item before and after {review}, where it has that, else all of it."""
    count = sum(field == "review" for _, field in parse_template("prompt.item", item))
    texts = re.split(r"(?<!\{)\{review\}", item)
    if len(texts) != count + 1 or count > 1:
        raise PromptError("prompt.item: {review} may occur once, and no brace may stand before it")
    if count and not any(texts):
        raise PromptError("prompt.item: needs more than {review}, since an event may have no text")
    return texts


def template_prefix(config: PromptConfig, tokenizer: Tokenizer | None) -> Int32:
    """The tokens of a prompt before the history, [t] int32."""
    return encode_template("prompt.template", _split_template(config.template)[0], tokenizer)


def _split_template(template: str) -> tuple[str, str]:
    parts = parse_template("prompt.template", template, known=["history"])
    count = sum(field is not None for _, field in parts)
    if count != 1:
        raise PromptError(f"prompt.template: needs {{history}} exactly once, found {count}")
    at = next(i for i, (_, field) in enumerate(parts) if field is not None)
    return "".join(text for text, _ in parts[: at + 1]), "".join(text for text, _ in parts[at + 1 :])


def parse_template(
    name: str, template: str, known: Sequence[str] | None = None
) -> list[tuple[str, str | None]]:
    """(text, placeholder that follows it or None) in order; braces are doubled to stand for themselves.

    PromptError where it cannot be read, or has a placeholder that is not `known`; None: any will do.
    """
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as cause:
        raise PromptError(f"{name}: {cause}") from None
    for _, field, spec, conversion in pieces:
        if field is not None and (spec or conversion or not field):
            raise PromptError(f"{name}: a placeholder is a plain name, found {{{field}}} with extras")
        if field is not None and known is not None and field not in known:
            most = ", ".join(f"{{{x}}}" for x in known) + " only" if known else "none"
            raise PromptError(f"{name}: unknown placeholder {{{field}}}; it may hold {most}")
    return [(text, field) for text, field, _, _ in pieces]


def encode_fixed(name: str, template: str, tokenizer: Tokenizer | None) -> Int32:
    """The tokens of a template that may hold no placeholder."""
    text = "".join(text for text, _ in parse_template(name, template, known=[]))
    return encode_template(name, text, tokenizer)


def encode_template(name: str, text: str, tokenizer: Tokenizer | None) -> Int32:
    """The tokens of a template's text, which is taken as it stands."""
    if not text:
        return np.zeros(0, np.int32)
    if tokenizer is None:
        raise PromptError(f"{name}: the text {text!r} needs a tokenizer")
    _check_names(name, text, tokenizer)
    try:
        tokens = tokenizer.encode(text)
    except PromptError as cause:
        raise PromptError(f"{name}: {text!r}: {cause}") from None
    if tokenizer.unknown_id in tokens:
        raise PromptError(f"{name}: {text!r} holds text that the tokenizer does not know")
    return np.array(tokens, np.int32)


def _check_names(name: str, text: str, tokenizer: Tokenizer) -> None:
    for token in re.findall(r"<[^<>\s]+>", text):
        if tokenizer.token_id(token) is None:
            raise PromptError(f"{name}: {token!r} is not a token of the tokenizer{tokenizer.nearest(token)}")


def encode_items(
    where: str, template: str, tokenizer: Tokenizer | None, catalog: Catalog
) -> tuple[Int32, Int64]:
    """All items' tokens one after the other, [total] int32, and their numbers, [n] int64. where: names the field."""
    parts = parse_template(where, template)
    columns: list[tuple[Int32, Int64]] = []
    pending: list[tuple[str, str | None]] = []
    for text, field in parts:
        if field != "sid":
            pending.append((text, field))
            continue
        columns.append(_text_column(where, [*pending, (text, None)], tokenizer, catalog))
        columns.append(_sid_column(tokenizer, catalog))
        pending = []
    columns.append(_text_column(where, pending, tokenizer, catalog))
    flat, lengths = _interleave(columns, catalog.n_items)
    if not lengths.all():
        item_id = catalog.item_ids[int(np.argmin(lengths))]
        raise PromptError(f"{where}: {template!r} gives no token for item {item_id!r}")
    return flat, lengths


def _sid_column(tokenizer: Tokenizer | None, catalog: Catalog) -> tuple[Int32, Int64]:
    tokens = level_tokens(catalog, tokenizer, MAX_TOKEN + 1)
    flat = np.stack(
        [tokens[level][catalog.codes[:, level]] for level in range(catalog.depth)], axis=1
    ).ravel()
    return flat, np.full(catalog.n_items, catalog.depth, np.int64)


def _text_column(
    where: str, parts: list[tuple[str, str | None]], tokenizer: Tokenizer | None, catalog: Catalog
) -> tuple[Int32, Int64]:
    """The text between two `{sid}`, tokenised as one text per item."""
    n = catalog.n_items
    fields = [field for _, field in parts if field is not None]
    if not fields:
        constant = encode_template(where, "".join(text for text, _ in parts), tokenizer)
        return np.tile(constant, n), np.full(n, len(constant), np.int64)
    if tokenizer is None:
        raise PromptError(f"{where}: the text of {{{fields[0]}}} needs a tokenizer")
    _check_names(where, " ".join(text for text, _ in parts), tokenizer)
    values = {field: _field_texts(where, field, catalog) for field in fields}
    texts = [
        "".join(text + (values[field][row] if field else "") for text, field in parts) for row in range(n)
    ]
    encoded: list[list[int]] = []
    for at in range(0, n, _PIECES_PER_CALL):
        some = slice(at, at + _PIECES_PER_CALL)
        encoded += _encode_texts(where, texts[some], catalog.item_ids[some], tokenizer)
    lengths = np.array([len(ids) for ids in encoded], np.int64)
    return np.fromiter((token for ids in encoded for token in ids), np.int32, int(lengths.sum())), lengths


def _encode_texts(
    where: str, texts: list[str], item_ids: Sequence[str], tokenizer: Tokenizer
) -> list[list[int]]:
    try:
        return tokenizer.encode_batch(texts)
    except PromptError:
        # Once more, one by one, for the name of the item; this way does not return.
        for item_id, text in zip(item_ids, texts, strict=False):
            try:
                tokenizer.encode(text)
            except PromptError as cause:
                raise PromptError(f"{where}: item {item_id!r}: {cause}") from None
        raise


def _field_texts(where: str, field: str, catalog: Catalog) -> list[str]:
    """The metadata field of every item as text."""
    texts: list[str] = []
    for row, fields in enumerate(catalog.metadata):
        value = fields.get(field)
        if type(value) not in (str, int, float):
            raise PromptError(_missing(where, field, row, catalog))
        texts.append(str(value))
    return texts


def _missing(where: str, field: str, row: int, catalog: Catalog) -> str:
    known = sorted({"sid"}.union(*(fields.keys() for fields in catalog.metadata)))
    if field not in known:
        near = difflib.get_close_matches(field, known, n=1)
        hint = f"nearest: {{{near[0]}}}" if near else f"known: {', '.join(known[:20])}"
        return f"{where}: unknown placeholder {{{field}}}; {hint}"
    item_id, fields = catalog.item_ids[row], catalog.metadata[row]
    if field not in fields:
        return f"{where}: item {item_id!r} has no metadata field {field!r}"
    return f"{where}: metadata field {field!r} of item {item_id!r} is neither text nor a number"


def _interleave(columns: list[tuple[Int32, Int64]], n: int) -> tuple[Int32, Int64]:
    """Row-wise concatenation of ragged columns, each given as flat values [total] and lengths [n]."""
    lengths = np.zeros((n, len(columns)), np.int64)
    for c, (_, column_lengths) in enumerate(columns):
        lengths[:, c] = column_lengths
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    flat = np.empty(int(lengths.sum()), np.int32)
    for c, (values, column_lengths) in enumerate(columns):
        own = np.cumsum(column_lengths) - column_lengths
        flat[np.repeat(starts[:, c] - own, column_lengths) + np.arange(len(values))] = values
    return flat, lengths.sum(axis=1)
