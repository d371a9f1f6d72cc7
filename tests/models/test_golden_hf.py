# SPDX-License-Identifier: Apache-2.0
"""Parity with every array of tests/golden/hf: an independent implementation's forwards, caches and beam searches."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.data.prefix_tree import PrefixTree
from jgr.models import beam, decoder, hf

HF = Path(__file__).parents[1] / "golden" / "hf"
FAMILIES = ("qwen2", "qwen3", "llama3")
ATOL = 1e-4  # what the golden set states for float32

Model = tuple[decoder.DecoderConfig, decoder.DecoderParams]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Model:
    return hf.load(HF / family)


prefill = jax.jit(decoder.prefill, static_argnames=("cfg", "keep_layers"))
score_leaves = jax.jit(beam.score_leaves, static_argnames=("cfg", "normalize"))


def close(got: jax.Array, want: np.ndarray, keep: np.ndarray | None = None) -> None:
    got_np = np.asarray(got)
    assert got_np.shape == want.shape
    if keep is not None:
        got_np, want = got_np[..., keep, :], want[..., keep, :]
    np.testing.assert_allclose(got_np, want, atol=ATOL, rtol=0)


def run(model: Model, ids: np.ndarray, positions: np.ndarray, mask: np.ndarray | None, lengths: np.ndarray):
    cfg, params = model
    out = prefill(
        params,
        cfg,
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        mask=None if mask is None else jnp.asarray(mask),
        keep_layers=True,
    )
    return out, decoder.logits(params, out.hidden)


@pytest.mark.parametrize("case", ["full", "rpad", "lpad", "custom", "packed"])
def test_forward(family: str, model: Model, case: str) -> None:
    golden = np.load(HF / family / "golden_forward.npz")
    z = {key.removeprefix(case + "_"): golden[key] for key in golden.files if key.startswith(case + "_")}
    batch, tokens = z["input_ids"].shape
    keep = z.get("attention_mask", np.ones((batch, tokens))).astype(bool)
    causal = np.tril(np.ones((tokens, tokens), bool))
    mask, lengths = None, np.full(batch, tokens)
    if case == "rpad":
        lengths = keep.sum(1)  # by length, without any mask
    elif case == "lpad":
        mask = causal & keep[:, None, :]
    elif case == "packed":
        segments = z["packed_segment_ids"] if "packed_segment_ids" in z else z["segment_ids"]
        mask = causal & (segments[:, :, None] == segments[:, None, :])
    out, logits = run(model, z["input_ids"], z["position_ids"], mask, lengths)
    close(model[1].embed[z["input_ids"]], z["embeds"])
    for row in range(batch):
        close(out.layers[:, row], z["layers"][:, row], keep[row])
        close(out.hidden[row], z["final"][row], keep[row])
        close(logits[row], z["logits"][row], keep[row])
        if "k" in z:
            close(out.context.k[:, row], z["k"][:, row], keep[row])
            close(out.context.v[:, row], z["v"][:, row], keep[row])


@pytest.mark.parametrize("layout", ["p0_up_", "p0_ip_", "p1_up_", "p1_ip_"])
def test_bipartite_masks(family: str, model: Model, layout: str) -> None:
    golden = np.load(HF / family / "golden_bipartite.npz")
    z = {key.removeprefix(layout): golden[key] for key in golden.files if key.startswith(layout)}
    lengths = np.array([len(z["input_ids"])])
    out, logits = run(model, z["input_ids"][None], z["position_ids"][None], z["mask"][None], lengths)
    close(model[1].embed[z["input_ids"]], z["embeds"])
    close(out.layers[:, 0], z["layers"])
    close(out.hidden[0], z["final"])
    close(logits[0], z["logits"])
    close(out.context.k[:, 0], z["k"])
    close(out.context.v[:, 0], z["v"])


@pytest.mark.parametrize("layout", ["p0_up_", "p0_ip_", "p1_up_", "p1_ip_"])
def test_items_generated_after_bipartite_prompts(family: str, model: Model, layout: str) -> None:
    """Teacher-forced item likelihoods: the prompt's last row, then decodes at the positions that follow it."""
    cfg, params = model
    golden = np.load(HF / family / "golden_bipartite.npz")
    items, z = (
        golden["items"],
        {k.removeprefix(layout): golden[k] for k in golden.files if k.startswith(layout)},
    )
    tree, tables = item_tables(items, params)
    out, _ = run(
        model, z["input_ids"][None], z["position_ids"][None], z["mask"][None], np.array([len(z["mask"])])
    )
    # rope is relative and items are alone behind the prompt, so the cached keys are kept and only the start moves
    start = jnp.asarray([int(z["position_ids"][-1]) + 1], jnp.int32)
    leaves = jnp.asarray(tree.leaf_of_row)[None]
    for normalize, name in (("full", "items_sum_logprob"), ("valid", "items_sum_logprob_renorm")):
        scores = score_leaves(
            params,
            tables,
            out.hidden[:, -1:],
            out.context,
            jnp.array([len(z["mask"])]),
            leaves,
            cfg=cfg,
            normalize=normalize,
            start=start,
        )
        np.testing.assert_allclose(np.asarray(scores[0]), z[name], atol=ATOL, rtol=0)


def item_tables(items: np.ndarray, params: decoder.DecoderParams) -> tuple[PrefixTree, beam.CatalogTables]:
    """Catalog tables over [M, 3] token ids, each level's vocabulary being the tokens that occur."""
    vocabularies = [np.unique(items[:, level]) for level in range(items.shape[1])]
    codes = np.stack([np.searchsorted(v, items[:, level]) for level, v in enumerate(vocabularies)], 1)
    tree = PrefixTree.build(codes.astype(np.int32))
    return tree, beam.catalog_tables(tree, tuple(v.astype(np.int32) for v in vocabularies), params)


def automaton_tables(
    cfg: decoder.DecoderConfig, params: decoder.DecoderParams, depth: int
) -> beam.CatalogTables:
    """No constraint, as tables: one node a level whose children are the whole vocabulary (node indices are clamped)."""
    every = jnp.arange(cfg.vocab_size, dtype=jnp.int32)
    return beam.CatalogTables(
        offsets=(jnp.array([0, cfg.vocab_size], jnp.int32),) * depth,
        codes=(every,) * depth,
        paths=jnp.zeros((1, depth), jnp.int32),
        tokens=(every,) * depth,
        head=(decoder.head_rows(params),) * depth,
        max_degrees=(cfg.vocab_size,) * depth,
    )


def prompts(z: np.lib.npyio.NpzFile) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(np.maximum(z["prompts"], 0), jnp.int32), jnp.asarray(z["prompt_lengths"], jnp.int32)


def search(
    model: Model, z: np.lib.npyio.NpzFile, items: np.ndarray, width: int, normalize: str
) -> tuple[np.ndarray, np.ndarray]:
    cfg, params = model
    _, tables = item_tables(items, params)
    tokens, lengths = prompts(z)
    n = len(tokens)
    beams = beam.recommend(
        params,
        tables,
        tokens,
        lengths,
        jnp.full(n, width),
        jnp.full((n, 1), tables.n_leaves),
        cfg=cfg,
        width=width,
        normalize=normalize,
    )
    vocabularies = [np.asarray(t) for t in tables.tokens]
    codes = np.asarray(beams.codes)
    return np.stack([v[codes[..., i]] for i, v in enumerate(vocabularies)], -1), np.asarray(beams.scores)


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize(("normalize", "tag"), [("full", ""), ("valid", "_renorm")])
def test_beam_search(family: str, model: Model, width: int, normalize: str, tag: str) -> None:
    z = np.load(HF / family / "golden_beam.npz")
    sequences, scores = search(model, z, z["items"], width, normalize)
    np.testing.assert_array_equal(sequences, z[f"w{width}{tag}_sequences"])
    np.testing.assert_allclose(scores, z[f"w{width}{tag}_sum_logprob"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(scores / 3, z[f"w{width}{tag}_hf_scores"], atol=ATOL, rtol=0)


def test_fewer_items_than_beams(family: str, model: Model) -> None:
    z = np.load(HF / family / "golden_beam.npz")
    width, n = int(z["short_width"]), len(z["short_items"])
    sequences, scores = search(model, z, z["short_items"], width, "full")
    np.testing.assert_array_equal(sequences[:, :n], z["short_sequences"])
    np.testing.assert_allclose(scores[:, :n], z["short_sum_logprob"], atol=ATOL, rtol=0)
    assert np.isneginf(scores[:, n:]).all()
    # the library fills those places with duplicates; its first n are ours
    np.testing.assert_array_equal(sequences[:, :n], z["short_hf_raw_sequences"][:, :n])
    np.testing.assert_allclose(scores[:, :n], z["short_hf_raw_sum_logprob"][:, :n], atol=ATOL, rtol=0)


def test_unconstrained_beam_search(family: str, model: Model) -> None:
    cfg, params = model
    z = np.load(HF / family / "golden_beam.npz")
    width = int(z["free_width"])
    tables = automaton_tables(cfg, params, depth=3)
    tokens, lengths = prompts(z)
    n = len(tokens)
    beams = beam.recommend(
        params,
        tables,
        tokens,
        lengths,
        jnp.full(n, width),
        jnp.full((n, 1), tables.n_leaves),
        cfg=cfg,
        width=width,
        normalize="full",
    )
    np.testing.assert_array_equal(np.asarray(beams.codes), z["free_sequences"])
    np.testing.assert_allclose(np.asarray(beams.scores), z["free_sum_logprob"], atol=ATOL, rtol=0)


def test_teacher_forced_items(family: str, model: Model) -> None:
    cfg, params = model
    z = np.load(HF / family / "golden_beam.npz")
    tree, tables = item_tables(z["items"], params)
    tokens, lengths = prompts(z)
    leaves = jnp.broadcast_to(jnp.asarray(tree.leaf_of_row), (len(tokens), len(z["items"])))
    for normalize, name in (("full", "items_sum_logprob"), ("valid", "items_sum_logprob_renorm")):
        scores = beam.rank(params, tables, tokens, lengths, leaves, cfg=cfg, normalize=normalize)
        np.testing.assert_allclose(np.asarray(scores), z[name], atol=ATOL, rtol=0)
