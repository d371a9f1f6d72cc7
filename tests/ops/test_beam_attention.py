# SPDX-License-Identifier: Apache-2.0
"""Beam attention: every form against loops in float64, the kernel interpreted; padding and dead beams without effect;
moving beam keys and values in place, and the order of parents without which that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.ops import beam_attention as op
from jgr.ops.beam_attention import beam_attention, pallas_triton, reorder, reorder_beam_kv
from jgr.ops.beam_attention.arguments import Arguments
from jgr.ops.beam_attention.cases import OP, REORDER
from jgr.ops.beam_attention.config import Config, Shape, choose_config
from jgr.ops.testing import Case
from tests.ops.closeness import assert_as_close_as_naive

FORMS = ("reference", "xla", "auto", "pallas_interpret")
CASES = {case.name: case for case in OP.tagged("ci")}
Arrays = dict[str, Any]

# Compiled once a shape; interpreted kernels are slow to compile.
CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
attend = jax.jit(beam_attention, static_argnames="implementation", compiler_options=CHEAP)
run = jax.jit(
    functools.partial(pallas_triton.run, interpret=True), static_argnames="config", compiler_options=CHEAP
)
move = jax.jit(reorder_beam_kv, static_argnames="implementation", compiler_options=CHEAP)


def softmax_mix(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query [d] over keys and values [n, d], float64."""
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def loop(arrays: Arrays) -> np.ndarray:
    """Beam by beam, head by head, in float64."""
    x = {n: np.asarray(a, np.float64 if a.dtype.kind in "fV" else np.int64) for n, a in arrays.items()}
    batch, width, heads, _ = x["q"].shape
    out = np.zeros(x["q"].shape)
    groups = heads // x["context_k"].shape[1]
    widths = x.get("widths", np.full(batch, width))
    for b, w, h in np.ndindex(batch, width, heads):
        if w < widths[b]:
            kv, length = h // groups, x["lengths"][b]
            own = [(s, row) for s, row in enumerate(x["ancestors"][b, :, w])]
            k = np.concatenate([x["context_k"][b, kv, :length], [x["beam_k"][b, s, r, kv] for s, r in own]])
            v = np.concatenate([x["context_v"][b, kv, :length], [x["beam_v"][b, s, r, kv] for s, r in own]])
            out[b, w, h] = softmax_mix(x["q"][b, w, h], k, v)
    return out


def widened(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_loop(case: Case, form: str) -> None:
    arrays = OP.draw(case, jnp.float32)
    naive = attend(**arrays, implementation="reference")
    assert_as_close_as_naive(attend(**arrays, implementation=form), loop(arrays), naive)


def same_dtype_throughout(arrays: Arrays) -> jax.Array:
    """The formula with every value in the dtype of the queries: what a kernel's error is measured by."""
    q, dtype = arrays["q"], arrays["q"].dtype
    batch, width, heads, dim = q.shape
    own = arrays["ancestors"][:, :, :, None, None]
    k, v = (
        jnp.concatenate(
            [
                jnp.broadcast_to(context[:, None], (batch, width, *context.shape[1:])),
                jnp.take_along_axis(beams, own, axis=2).transpose(0, 2, 3, 1, 4),
            ],
            axis=3,
        ).repeat(heads // context.shape[1], axis=2)
        for context, beams in (
            (arrays["context_k"], arrays["beam_k"]),
            (arrays["context_v"], arrays["beam_v"]),
        )
    )
    tokens, keys = arrays["context_k"].shape[2], k.shape[3]
    seen = (jnp.arange(keys) < arrays["lengths"][:, None]) | (jnp.arange(keys) >= tokens)
    scores = (jnp.einsum("bwhd,bwhsd->bwhs", q, k) * dim**-0.5).astype(dtype)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf).astype(dtype), axis=-1)
    return jnp.einsum("bwhs,bwhsd->bwhd", weights.astype(dtype), v).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", ["xla", "pallas_interpret"])
def test_16_bit_error_is_that_of_the_naive_form(dtype: Any, form: str) -> None:
    arrays = OP.draw(CASES["ragged"], dtype)
    got, naive = attend(**arrays, implementation=form), same_dtype_throughout(arrays)
    assert got.dtype == dtype
    assert_as_close_as_naive(got, loop(arrays), naive)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Case, Config]:
    """A call, and tiles for it. Few sizes: every new shape is a new program."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    width, kv_heads, groups = draw(st.sampled_from([(1, 1, 1), (3, 2, 3), (7, 1, 4)]))
    shape: dict[str, Any] = dict(
        tokens=draw(st.sampled_from([40, 48])),
        lengths=tuple(lengths),
        width=width,
        slots=draw(st.integers(1, 3)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 48])),
        widths=tuple(draw(st.integers(0, width)) for _ in lengths),
    )
    config = Config(16, 16, splits=draw(st.integers(1, 4)), merge_rows=draw(st.sampled_from([8, 16])))
    return Case("drawn", shape), config


@settings(max_examples=4, deadline=None, derandomize=True)
@given(calls(), st.integers(0, 2**16))
def test_the_kernel_equals_the_loop_whatever_the_tiles(call: tuple[Case, Config], seed: int) -> None:
    case, config = call
    arrays = OP.draw(case, jnp.float32, seed)
    got = run(Arguments(**arrays), config=config)
    assert_as_close_as_naive(got, loop(arrays), attend(**arrays, implementation="reference"))


@pytest.mark.parametrize("form", ["reference", "xla", "pallas_interpret", "split"])
def test_padding_and_dead_beams_have_no_effect(form: str) -> None:
    def call(arrays: Arrays) -> np.ndarray:
        if form == "split":
            return widened(run(Arguments(**arrays), config=Config(16, 16, splits=3)))
        return widened(attend(**arrays, implementation=form))

    arrays = OP.draw(CASES["widths"], jnp.float32)
    # A dead beam's ancestors may be anything that exists; a live one descends from live ones.
    ancestors = np.asarray(arrays["ancestors"]) % np.array([4, 9])[:, None, None]
    arrays["ancestors"] = jnp.asarray(ancestors)
    clean, dirty = call(arrays), {name: np.array(a) for name, a in arrays.items()}
    for b, (length, width) in enumerate(zip(arrays["lengths"], arrays["widths"], strict=True)):
        dirty["context_k"][b, :, length:] = dirty["context_v"][b, :, length:] = np.nan
        dirty["q"][b, width:] = np.nan
        dirty["beam_k"][b, :, width:] = dirty["beam_v"][b, :, width:] = np.nan
        assert not clean[b, width:].any()
    np.testing.assert_array_equal(call({n: jnp.asarray(a) for n, a in dirty.items()}), clean)


@pytest.mark.parametrize("form", ["reference", "xla", "pallas_interpret"])
def test_a_request_does_not_see_its_neighbours(form: str) -> None:
    arrays = OP.draw(CASES["ragged"], jnp.float32)
    together = widened(attend(**arrays, implementation=form))
    alone = attend(**{name: a[1:2] for name, a in arrays.items()}, implementation=form)
    np.testing.assert_allclose(alone[0], together[1], atol=1e-6)


@pytest.mark.parametrize("form", ["reference", "xla", "pallas_interpret"])
def test_no_table_means_that_rows_stand_in_place(form: str) -> None:
    arrays = OP.draw(CASES["ragged"], jnp.float32)
    arrays["ancestors"] = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (3, 2, 5))
    want = attend(**arrays, implementation=form)
    arrays["ancestors"] = None
    np.testing.assert_array_equal(attend(**arrays, implementation=form), want)


def test_every_form_takes_all_arguments() -> None:
    def parameters(call: Any) -> dict[str, Any]:
        found = inspect.signature(call, eval_str=True).parameters.values()
        return {p.name: p.annotation for p in found if p.name != "implementation"}

    assert list(Arguments._fields) == list(parameters(beam_attention))
    for implementation in op.IMPLEMENTATIONS:
        assert list(parameters(implementation.call).values()) == [Arguments]
    for implementation in reorder.IMPLEMENTATIONS:
        assert list(parameters(implementation.call)) == list(parameters(reorder_beam_kv))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dim=24), "head size is 24"),
        (dict(dim=272), "head size is 272"),
        (dict(slots=9), "9 slots"),
        (dict(tokens=0, lengths=(0,)), "room for no token"),
        (dict(tokens=2**23, heads=16, kv_heads=16), "more elements than an int32"),
    ],
)
def test_the_kernel_says_why_it_cannot_run(change: dict[str, Any], reason: str) -> None:
    case = Case("changed", {**CASES["greedy"].shape, **change})
    with pytest.raises(ValueError, match=f"'pallas' cannot run: .*{reason}"):
        jax.eval_shape(lambda x: beam_attention(**x, implementation="pallas"), OP.shapes(case, jnp.float32))


def test_the_kernel_wants_one_dtype() -> None:
    shapes = OP.shapes(CASES["greedy"], jnp.float32)
    shapes["beam_k"] = jax.ShapeDtypeStruct(shapes["beam_k"].shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="not all float32"):
        jax.eval_shape(lambda x: beam_attention(**x, implementation="pallas"), shapes)


@pytest.mark.parametrize(
    "bad", [dict(block_rows=48), dict(block_tokens=8), dict(splits=0), dict(merge_rows=3)]
)
def test_impossible_tiles_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Config(**bad)


def test_few_programs_share_a_prompt_and_many_do_not() -> None:
    one = Shape(batch=1, kv_heads=8, rows=256, tokens=1024, dim=128, itemsize=2)
    assert choose_config(one) == Config(block_rows=64, block_tokens=64, splits=4, warps=4, stages=3)
    assert choose_config(one._replace(batch=8)).splits == 1
    assert choose_config(one._replace(tokens=64)).splits == 1
    for batch, rows, tokens, dim, itemsize in itertools.product(
        (1, 64), (1, 40, 4096), (1, 9000), (32, 256), (2, 4)
    ):
        config = choose_config(Shape(batch, 4, rows, tokens, dim, itemsize))
        assert dataclasses.replace(config) == config  # passes its own checks
        assert config.splits <= max(1, tokens // 32)


# --- moving beam keys and values


def by_index(kv: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """kv [L, B, S, W, K, d]."""
    return np.stack([kv[:, b][:, :, parents[b]] for b in range(len(parents))], axis=1)


@pytest.mark.parametrize("case", REORDER.tagged("ci"), ids=lambda c: c.name)
@pytest.mark.parametrize("form", ["xla", "auto", "pallas_interpret"])
def test_rows_move_to_where_their_parents_stood(case: Case, form: str) -> None:
    arrays = REORDER.draw(case, jnp.float32)
    got = move(**arrays, implementation=form)
    np.testing.assert_array_equal(got, by_index(*(np.asarray(arrays[n]) for n in ("kv", "parents"))))


def moved_in_place(parents: np.ndarray) -> np.ndarray:
    """Which row each row holds afterwards [N, W], for N vectors of parents."""
    n, width = parents.shape
    kv = jnp.broadcast_to(jnp.arange(width, dtype=jnp.float32)[:, None, None], (n, 1, width, 1, 16))
    moved = move(kv, jnp.asarray(parents, jnp.int32), implementation="pallas_interpret")
    return np.asarray(moved)[:, 0, :, 0, 0].astype(int)


def test_parents_that_never_decrease_are_moved_rightly_and_others_wrongly() -> None:
    every = np.array(list(itertools.product(range(4), repeat=4)))
    right = (moved_in_place(every) == every).all(axis=1)
    ordered = (np.diff(every, axis=1) >= 0).all(axis=1)
    assert ordered.sum() == 35
    assert right[ordered].all()
    assert not right.all()
    assert moved_in_place(np.array([[1, 0]])).tolist() == [
        [1, 1]
    ]  # row 0 was overwritten before row 1 read it


def test_long_rows_of_parents_are_moved_rightly() -> None:
    # More rows than one turn of the kernel's loop holds, so that the turns' order counts too.
    parents = np.sort(np.random.default_rng(0).integers(0, 37, (5, 37)), axis=1)
    np.testing.assert_array_equal(moved_in_place(parents), parents)


def test_both_variants_attend_to_the_same_tokens() -> None:
    """Two selections in score order: a table of ancestors, or rows moved in place in parent-major order."""
    arrays = OP.draw(CASES["ragged"], jnp.float32)
    batch, width = arrays["q"].shape[:2]
    parents = jnp.asarray(np.random.default_rng(1).integers(0, width, (batch, width)), jnp.int32)
    rows = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    arrays["ancestors"] = jnp.stack(
        [parents, rows], axis=1
    )  # slot 0 written before the selection, slot 1 after
    by_table = attend(**arrays)

    order = jnp.argsort(parents, axis=-1, stable=True)  # place p holds the beam of rank order[p]
    in_order = jnp.take_along_axis(parents, order, axis=1)
    assert (np.diff(np.asarray(in_order), axis=1) >= 0).all()

    def direct(parents: jax.Array, order: jax.Array) -> jax.Array:
        def slots(kv: jax.Array) -> jax.Array:
            first = move(kv[:, :1], parents, implementation="pallas_interpret")
            second = jnp.take_along_axis(kv[:, 1], order[..., None, None], axis=1)
            return jnp.stack([first[:, 0], second], axis=1)

        moved = {**arrays, "beam_k": slots(arrays["beam_k"]), "beam_v": slots(arrays["beam_v"])}
        moved["q"] = jnp.take_along_axis(arrays["q"], order[..., None, None], axis=1)
        out = attend(**{**moved, "ancestors": None})
        back = jnp.argsort(order, axis=1)
        return jnp.take_along_axis(out, back[..., None, None], axis=1)

    np.testing.assert_allclose(direct(in_order, order), by_table, atol=1e-6)
    assert np.abs(np.asarray(direct(parents, rows)) - np.asarray(by_table)).max() > 0.1  # in order of score
