# SPDX-License-Identifier: Apache-2.0
"""Parity of the decoders and of beam search with tests/golden/hf, array by array.

    python -m tools.golden_parity [FOLDER]          prints the largest error of every array

`comparisons` is the one place that says how each array is reproduced; the tests assert on what it yields. All sizes are
those of the files: layers, heads, prompts, beam widths and the depth of an item. An array that is missing, that holds
what is no number, or that nothing reproduces is a GoldenError, so no array can drop out unnoticed.

Exit codes: 0 every array within what its golden set states, 1 not so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.catalog.child_bitmaps import wide_children
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models import beam, decoder, hf
from jgr.prompt.layouts import CAUSAL, ITEM_PREFIX, USER_PREFIX, Kind, Layout, Tokens

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "hf"
FAMILIES = ("qwen2", "qwen3", "llama3")
FILES = ("forward", "bipartite", "beam")
FORWARD_CASES = ("full", "rpad", "lpad", "custom", "packed")
ATOL = 1e-4  # what the golden set states for float32
INPUTS = re.compile(
    r"\w*(input_ids|position_ids|segment_ids|attention_mask|_mask|items|item_ids|item_lengths|instr_ids|user_ids"
    r"|prompts|prompt_lengths|_width|min_decision_gap)"
)
"""Arrays that are fed to the model, or that describe the others; all the rest must be reproduced."""

Array = npt.NDArray[Any]
Model = tuple[decoder.DecoderConfig, decoder.DecoderParams]

_prefill = jax.jit(decoder.prefill, static_argnames=("cfg", "keep_layers", "layout"))
_score_leaves = jax.jit(beam.score_leaves, static_argnames=("cfg", "normalize"))


class GoldenError(Exception):
    """A golden file that cannot be held against the models; the message names the file and the array."""


class Arrays(dict[str, Array]):
    """The arrays of a golden file, or those whose names begin with a prefix, by the rest of their names."""

    def __init__(self, file: str, arrays: Mapping[str, Array], prefix: str = "") -> None:
        super().__init__({k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)})
        self._file, self._prefix = file, prefix

    def __missing__(self, name: str) -> Array:
        raise GoldenError(f"{self._file}: there is no array {self._prefix}{name}")

    def under(self, prefix: str) -> Arrays:
        return Arrays(self._file, self, prefix)

    def numbers(self, pattern: str) -> list[int]:
        """The numbers that stand in names of this pattern, ascending; GoldenError where there are none."""
        found = sorted({int(match[1]) for match in map(re.compile(pattern).fullmatch, self) if match})
        if not found:
            raise GoldenError(f"{self._file}: there is no array {pattern}")
        return found


def load(path: Path) -> Arrays:
    """A golden file. GoldenError where it is missing, or an array holds what is no finite number."""
    if not path.is_file():
        raise GoldenError(f"{path}: there is no such file")
    arrays = dict(np.load(path))
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise GoldenError(f"{path.stem}: {name} holds what is no finite number")
    return Arrays(path.stem, arrays)


class Comparison(NamedTuple):
    """One golden array and ours, over the positions that the golden set says to compare."""

    file: str
    array: str
    got: Array
    want: Array

    @property
    def error(self) -> float:
        """Largest absolute difference; infinite where shapes differ or a difference is not a number."""
        if self.got.shape != self.want.shape:
            return float("inf")
        worst = float(np.abs(self.got.astype(np.float64) - self.want).max(initial=0.0))
        return float("inf") if np.isnan(worst) else worst

    def is_within(self, atol: float) -> bool:
        """Whether the error is; whole numbers and truth values must be equal."""
        return self.error <= (0 if self.want.dtype.kind in "iub" else atol)


def comparisons(family: str, files: Sequence[str] = FILES, folder: Path = GOLDEN) -> Iterator[Comparison]:
    """Every output array of the family's golden files, or of some of them. Raises GoldenError."""
    model = hf.load(folder / family)
    compared_by = {"forward": _forward, "bipartite": _bipartite, "beam": _beam}
    for file in files:
        arrays = load(folder / family / f"golden_{file}.npz")
        yield from held_against(f"golden_{file}", arrays, compared_by[file](model, arrays), INPUTS)


def held_against(file: str, arrays: Arrays, named: Named, inputs: re.Pattern[str]) -> Iterator[Comparison]:
    """Compare the named arrays with a file's.

    Raises GoldenError at the end where an array, not an input, was not named.
    """
    left = {name for name in arrays if not inputs.fullmatch(name)}
    for name, got, want in named:
        left.discard(name)
        yield Comparison(file, name, np.asarray(got), want)
    if left:
        raise GoldenError(f"{file}: nothing reproduces {', '.join(sorted(left))}")


Named = Iterator[tuple[str, Any, Array]]


def _run(
    model: Model,
    shape: tuple[int, int],
    ids: Array,
    positions: Array,
    lengths: Array,
    segments: Tokens | None = None,
    layout: Layout = CAUSAL,
) -> tuple[decoder.Prefill, Array]:
    """What prompts give and their logits, of rows and tokens up to `shape`, which the prompts of a file share, as their
    programs; behind the prompts' own they mean nothing. lengths: of prompts without segments."""
    cfg, params = model
    rows = np.minimum(np.arange(shape[0]), len(ids) - 1)

    def padded(x: Array, fill: int = 0) -> Array:
        behind = ((0, 0), (0, shape[1] - x.shape[1]))
        return np.pad(x[rows], behind, constant_values=fill).astype(np.int32)

    if segments is not None:
        request, *others = segments
        segments = Tokens(padded(request, -1), *map(padded, others))
    out = _prefill(
        params,
        cfg,
        padded(ids),
        (lengths if segments is None else np.full(len(ids), shape[1]))[rows].astype(np.int32),
        positions=padded(positions),
        segments=segments,
        layout=layout,
        keep_layers=True,
    )
    return out, np.asarray(decoder.logits(params, out.hidden))


def _forward(model: Model, arrays: Arrays) -> Named:
    shapes = [arrays.under(case + "_")["input_ids"].shape for case in FORWARD_CASES]
    shape = max(batch for batch, _ in shapes), max(tokens for _, tokens in shapes)
    for case in FORWARD_CASES:
        z = arrays.under(case + "_")
        batch, tokens = z["input_ids"].shape
        is_padded = case in ("rpad", "lpad", "custom")
        keep = z["attention_mask"].astype(bool) if is_padded else np.ones((batch, tokens), bool)
        segments, lengths = None, np.full(batch, tokens)
        if case == "rpad":
            lengths = keep.sum(1)  # by length, without segments
        elif case == "lpad":
            segments = _segments(np.where(keep, 0, -1), np.zeros_like(keep), np.full(keep.shape, Kind.USER))
        elif case == "packed":
            segments = _segments(z["segment_ids"], np.zeros_like(keep), np.full(keep.shape, Kind.USER))
        out, logits = _run(model, shape, z["input_ids"], z["position_ids"], lengths, segments)
        own = np.s_[:batch, :tokens]
        yield f"{case}_embeds", np.asarray(model[1].embed)[z["input_ids"]], z["embeds"]
        for name, got in (("final", out.hidden), ("logits", logits)):
            yield f"{case}_{name}", np.asarray(got)[own][keep], z[name][keep]
        yield f"{case}_layers", np.asarray(out.layers)[:, :batch, :tokens][:, keep], z["layers"][:, keep]
        for name, got in (("k", out.context.k), ("v", out.context.v)):
            if case != "packed":  # which the library gives no cache of; [L, B, K, T, d]
                ours, theirs = (np.moveaxis(np.asarray(x), 3, 2) for x in (got, z[name]))
                yield f"{case}_{name}", ours[:, :batch, :tokens][:, keep], theirs[:, keep]


def _segments(request: Array, segment: Array, kind: Array) -> Tokens:
    """[B, T] each; what is earlier goes by index. Rope's positions are given apart."""
    order = np.broadcast_to(np.arange(request.shape[1]), request.shape)
    return Tokens(*(x.astype(np.int32) for x in (request, segment, kind, order, order)))


def _bipartite(model: Model, arrays: Arrays) -> Named:
    tree, tables = _item_tables(arrays["items"], model[1], _vocabularies(arrays["items"]))
    leaves = tree.leaf_of_row[None]
    layouts = [f"p{prompt}_{which}_" for prompt in arrays.numbers(r"p(\d+)_\w+") for which in ("up", "ip")]
    shape = 1, max(len(arrays.under(layout)["input_ids"]) for layout in layouts)
    for layout in layouts:
        z = arrays.under(layout)
        count = len(z["input_ids"])
        length = np.array([count], np.int32)
        segment = z["segment_ids"][None]  # the user's text, each item's, the instruction
        kinds = np.array([Kind.USER, *[Kind.ITEM] * (segment.max() - 1), Kind.INSTRUCTION])[segment]
        segments = _segments(np.zeros_like(segment), segment, kinds)
        which = USER_PREFIX if layout.endswith("_up_") else ITEM_PREFIX
        ids, positions = z["input_ids"][None], z["position_ids"][None]
        out, logits = _run(model, shape, ids, positions, length, segments, which)
        yield f"{layout}embeds", np.asarray(model[1].embed)[z["input_ids"]], z["embeds"]
        assert out.layers is not None
        for name, got in (
            ("layers", out.layers[:, 0, :count]),
            ("final", out.hidden[0, :count]),
            ("logits", logits[0, :count]),
            ("k", out.context.k[:, 0, :, :count]),
            ("v", out.context.v[:, 0, :, :count]),
        ):
            yield layout + name, got, z[name]
        start = z["position_ids"][-1:].astype(np.int32) + 1  # what is generated follows the instruction
        for normalize, name in (("full", "items_sum_logprob"), ("valid", "items_sum_logprob_renorm")):
            scores = _score_leaves(
                model[1],
                tables,
                out.hidden[:, count - 1 : count],
                decoder.State(out.context, jnp.asarray(length), jnp.asarray(start)),
                leaves,
                cfg=model[0],
                normalize=normalize,
            )
            yield layout + name, scores[0], z[name]


def _beam(model: Model, arrays: Arrays) -> Named:
    cfg, params = model
    depth, named_widths = arrays["items"].shape[1], arrays.numbers(r"w(\d+)_\w+")
    tokens = np.maximum(arrays["prompts"], 0).astype(np.int32)
    lengths = arrays["prompt_lengths"].astype(np.int32)
    vocabularies = _vocabularies(np.concatenate([arrays["items"], arrays["short_items"]]))
    tree, tables = _item_tables(arrays["items"], params, vocabularies)
    few = _as_long(_item_tables(arrays["short_items"], params, vocabularies)[1], tables)
    every = _unconstrained_tables(cfg, params, depth)

    widest = max(*named_widths, int(arrays["free_width"]), int(arrays["short_width"]))

    def search(tables: beam.CatalogTables, width: int, normalize: beam.Normalize) -> tuple[Array, Array]:
        # as the engine runs it: narrow beams in a wide program
        widths = np.full(len(tokens), width, np.int32)
        beams = beam.recommend(
            params, tables, tokens, lengths, widths, cfg=cfg, width=widest, normalize=normalize
        )
        codes = np.asarray(beams.codes)[:, :width]
        chosen = [np.asarray(t)[codes[..., level]] for level, t in enumerate(tables.tokens)]
        return np.stack(chosen, axis=-1), np.asarray(beams.scores)[:, :width]

    modes: tuple[tuple[beam.Normalize, str], ...] = (("full", ""), ("valid", "_renorm"))
    for width in named_widths:
        for normalize, tag in modes:
            sequences, scores = search(tables, width, normalize)
            yield f"w{width}{tag}_sequences", sequences, arrays[f"w{width}{tag}_sequences"]
            yield f"w{width}{tag}_sum_logprob", scores, arrays[f"w{width}{tag}_sum_logprob"]
            yield f"w{width}{tag}_hf_scores", scores / depth, arrays[f"w{width}{tag}_hf_scores"]
    sequences, scores = search(every, int(arrays["free_width"]), "full")
    yield "free_sequences", sequences, arrays["free_sequences"]
    yield "free_sum_logprob", scores, arrays["free_sum_logprob"]
    # Fewer items than beams: ours end in dead beams, the library's in duplicates that it says to drop.
    n = len(arrays["short_items"])
    sequences, scores = search(few, int(arrays["short_width"]), "full")
    for tag in ("", "hf_raw_"):
        yield f"short_{tag}sequences", sequences[:, :n], arrays[f"short_{tag}sequences"][:, :n]
        yield f"short_{tag}sum_logprob", scores[:, :n], arrays[f"short_{tag}sum_logprob"][:, :n]
    yield "short (dead beams)", np.isneginf(scores[:, n:]), np.ones_like(scores[:, n:], bool)
    leaves = np.broadcast_to(tree.leaf_of_row, (len(tokens), len(arrays["items"])))
    for normalize, tag in modes:
        scores = beam.rank(params, tables, tokens, lengths, leaves, cfg=cfg, normalize=normalize)
        yield f"items_sum_logprob{tag}", scores, arrays[f"items_sum_logprob{tag}"]


def _vocabularies(items: Array) -> list[Array]:
    """Each level's vocabulary: the tokens of [M, depth] that occur."""
    return [np.unique(items[:, level]).astype(np.int32) for level in range(items.shape[1])]


def _item_tables(
    items: Array, params: decoder.DecoderParams, vocabularies: Sequence[Array]
) -> tuple[PrefixTree, beam.CatalogTables]:
    """Catalog tables over [M, depth] token ids."""
    codes = [np.searchsorted(v, items[:, level]) for level, v in enumerate(vocabularies)]
    tree = PrefixTree.build(np.stack(codes, axis=1).astype(np.int32))
    return tree, beam.catalog_tables(tree, tuple(vocabularies), params)


def _as_long(short: beam.CatalogTables, tables: beam.CatalogTables) -> beam.CatalogTables:
    """Tables with nodes that nothing leads to, so that both share their programs."""

    def padded(x: Array, other: Array) -> jax.Array:
        behind = max(0, len(other) - len(x))
        return jnp.asarray(np.pad(x, [(0, behind), *[(0, 0)] * (x.ndim - 1)], mode="edge"))

    longer: beam.CatalogTables = jax.tree.map(padded, short, tables)
    return longer


def _unconstrained_tables(
    cfg: decoder.DecoderConfig, params: decoder.DecoderParams, depth: int
) -> beam.CatalogTables:
    """No constraint, as tables: one node a level with the whole vocabulary below it (node indices are clamped)."""
    every = jnp.arange(cfg.vocab_size, dtype=jnp.int32)
    offsets = np.array([0, cfg.vocab_size], np.int32)
    nodes, bitmaps = wide_children(offsets, np.asarray(every), cfg.vocab_size)
    return beam.CatalogTables(
        offsets=(jnp.asarray(offsets),) * depth,
        codes=(every,) * depth,
        wide_nodes=(jnp.asarray(nodes),) * depth,
        wide_bitmaps=(jnp.asarray(bitmaps),) * depth,
        paths=jnp.zeros((1, depth), jnp.int32),
        tokens=(every,) * depth,
        head=(params.output_rows,) * depth,
    )


def show(compared: Iterable[tuple[str, Comparison]], atol: float) -> int:
    """Print the largest error of every array, each with the name of its model; the exit code."""
    worst, within = 0.0, True
    print("| model | file | array | largest error |\n|---|---|---|---|")
    try:
        for model, c in compared:
            worst, within = max(worst, c.error), within and c.is_within(atol)
            print(f"| {model} | {c.file} | {c.array} | {'equal' if c.error == 0 else f'{c.error:.1e}'} |")
    except GoldenError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nlargest of all: {worst:.1e}; {'' if within else 'NOT '}all within {atol:.0e}")
    return 0 if within else 1


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0]) if argv else GOLDEN
    families = sorted(path.parent.name for path in folder.glob("*/config.json")) if argv else FAMILIES
    if not families:
        print(f"{folder}: there is no folder with a model's config.json", file=sys.stderr)
        return 1
    return show(((family, c) for family in families for c in comparisons(family, folder=folder)), ATOL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
