# SPDX-License-Identifier: Apache-2.0
"""Segment attention: every form against loops in float64 whose masks are written out layout by layout; splits into a
cached context, packing, order of requests and padding without effect; blocks left out only where nothing is seen."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.ops import segment_attention as op
from jgr.ops.segment_attention import (
    Arguments,
    Causal,
    Context,
    pallas_triton,
    reference,
    segment_attention,
    visibility,
    xla,
)
from jgr.ops.segment_attention.cases import OP, Prompt, batch, items_first, row, user_first
from jgr.prompt.layouts import (
    CAUSAL,
    ITEM_PREFIX,
    LAYOUTS,
    REPAIRED_ITEM,
    SINGLE_USER_MULTI_ITEM,
    USER_PREFIX,
    Kind,
    Layout,
    Tokens,
    describe,
)
from tests.ops.closeness import assert_as_close_as_naive
from tests.ops.model_14 import single_user

FORMS = ("reference", "xla", "pallas_interpret")
CASES = {case.name: case for case in OP.tagged("ci")}
TILES = pallas_triton.Tiles(16, 16, 1, 1)
SIZE = 48
Array = np.ndarray[Any, Any]

# Compiled once a shape; interpreted kernels are slow to compile.
CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COMPILED = {
    "reference": jax.jit(reference.segment_attention, compiler_options=CHEAP),
    "xla": jax.jit(functools.partial(xla.run, blocks=xla.Blocks(8)), compiler_options=CHEAP),
    "pallas_interpret": jax.jit(
        functools.partial(pallas_triton.run, tiles=TILES, interpret=True), compiler_options=CHEAP
    ),
}


def attend(
    form: str,
    arrays: Sequence[Any],
    tokens: Tokens,
    sees: Array,
    keys: Tokens | None = None,
    window: Array | None = None,
) -> Array:
    """In small blocks, with every option in use, so that one program serves all tests of a shape."""
    given = Arguments(
        *arrays,
        tokens,
        np.asarray(sees, np.int32),
        keys=tokens if keys is None else keys,
        window=np.full(sees.shape, 2**30, np.int32) if window is None else window,
    )
    return np.asarray(COMPILED[form](given))


@functools.cache
def case_call(case: str, implementation: str) -> Any:
    call = functools.partial(OP.call, **OP.options(CASES[case]), implementation=implementation)
    return jax.jit(call, compiler_options=CHEAP)


def softmax_mix(q: Array, k: Array, v: Array) -> Array:
    """One query [d] over keys and values [n, d], float64; 0 where there are none."""
    if len(k) == 0:
        return np.zeros(v.shape[1])
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


def loop(q: Any, k: Any, v: Any, mask: Array) -> Array:
    """mask: [B, T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, groups = np.zeros(q.shape), q.shape[2] // k.shape[1]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        out[b, t, h] = softmax_mix(q[b, t, h], k[b, h // groups, seen], v[b, h // groups, seen])
    return out


def values(
    tokens: Tokens, heads: int = 4, kv_heads: int = 2, dim: int = 16, seed: int = 0
) -> list[jax.Array]:
    """q, k, v of random numbers for tokens [B, T]."""
    rng = np.random.default_rng(seed)
    rows, count = tokens.request.shape
    shapes = ((rows, count, heads, dim), *[(rows, kv_heads, count, dim)] * 2)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def one_row(tokens: Tokens) -> Tokens:
    return Tokens(*(np.asarray(x)[None] for x in tokens))


# The masks of BAT-2, word by word: what a kind sees of other segments, and causal inside its own.
BAT_2 = {
    "user_prefix": {"U": "", "I": "U", "Instr": "UI"},
    "item_prefix": {"I": "", "U": "I", "Instr": "UI"},
}
LETTERS = {Kind.USER: "U", Kind.ITEM: "I", Kind.INSTRUCTION: "Instr"}


def written_out(layout: str, prompts: list[Prompt], size: int) -> Array:
    """[size, size] of packed prompts."""
    spots = [
        (request, segment, LETTERS[kind])
        for request, prompt in enumerate(prompts)
        for segment, (kind, length) in enumerate(prompt)
        for _ in range(length)
    ]
    mask = np.zeros((size, size), bool)
    for i, (request, segment, letter) in enumerate(spots):
        for j, (of, other, seen) in enumerate(spots):
            if request == of:
                within = segment == other and j <= i
                mask[i, j] = j <= i if layout == "causal" else within or seen in BAT_2[layout][letter]
    return mask


def model_14(c: int, history: int, targets: int, window: int = 0, full: int = 0) -> Array:
    """MODEL-14, word by word, but as the golden masks say: without full rows, targets have the window too."""
    length = c + history + targets
    m = length - targets - c + 1 if c > 0 else length - targets
    number = [min(max(0, p - c + 1), m) if c > 0 else min(p, m) for p in range(length)]
    mask = np.zeros((length, length), bool)
    for r in range(length):
        for col in range(length):
            a, b = number[r], number[col]
            see = a > b and (window == 0 or a - b <= window or (full > 0 and a >= m - full))
            mask[r, col] = r == col or see or (c > 0 and a == 0 and b < m)
    return mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["causal", "user_prefix", "item_prefix"])
def test_the_layouts_of_bat(layout: str, form: str) -> None:
    order = items_first if layout == "item_prefix" else user_first
    prompts = [order(6, (3, 1, 4), 2), order(3, (2, 2), 1)]
    tokens = one_row(row(prompts, SIZE))
    arrays = values(tokens)
    got = attend(form, arrays, tokens, LAYOUTS[layout].bits[tokens.kind])
    np.testing.assert_allclose(got, loop(*arrays, written_out(layout, prompts, SIZE)[None]), atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("window", "full"), [(0, 0), (4, 0), (4, 3)])
@pytest.mark.parametrize("contextual", [0, 3])
def test_the_masks_of_model_14(contextual: int, window: int, full: int, form: str) -> None:
    described, windows = single_user(contextual, 43 - contextual, 5, max_attention=window, full_rows=full)
    tokens = one_row(described)
    arrays = values(tokens)
    sees = SINGLE_USER_MULTI_ITEM.bits[tokens.kind]
    got = attend(form, arrays, tokens, sees, window=None if windows is None else windows[None])
    mask = model_14(contextual, 43 - contextual, 5, window, full)
    np.testing.assert_allclose(got, loop(*arrays, mask[None]), atol=2e-6)


@pytest.mark.parametrize("layout", [USER_PREFIX, CAUSAL])
def test_a_probe_sees_its_item_the_user_and_the_instruction(layout: Layout) -> None:
    tokens = describe(
        [Kind.USER, Kind.ITEM, Kind.ITEM, Kind.INSTRUCTION, Kind.PROBE, Kind.PROBE], [2, 1, 1, 1, 1, 1]
    )
    tokens = one_row(tokens._replace(segment=np.array([0, 0, 1, 2, 3, 1, 2], np.int32)))
    arrays = values(tokens)
    mask = np.zeros((1, 7, 7), bool)
    for query, seen in enumerate(
        [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 3, 4], [0, 1, 2, 4, 5], [0, 1, 3, 4, 6]]
    ):
        mask[0, query, seen] = True
    if layout == CAUSAL:
        mask[0, 3, 2] = True  # an item sees those before it; probes see the same in both
    got = attend("xla", arrays, tokens, layout.bits[tokens.kind])
    np.testing.assert_allclose(got, loop(*arrays, mask), atol=2e-6)


def test_positions_of_bat_19() -> None:
    items_then_user = describe(
        [Kind.ITEM, Kind.ITEM, Kind.USER, Kind.INSTRUCTION], [2, 3, 3, 2], [0, 0, 4, 7]
    )
    assert items_then_user.position.tolist() == [0, 1, 0, 1, 2, 4, 5, 6, 7, 8]
    user_then_items = describe(
        [Kind.USER, Kind.ITEM, Kind.ITEM, Kind.INSTRUCTION], [3, 2, 3, 2], [0, 3, 3, 7]
    )
    assert user_then_items.position.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("case", CASES)
def test_cases_equal_the_reference(case: str, implementation: str) -> None:
    arrays = OP.draw(CASES[case], jnp.float32)
    want = case_call(case, "reference")(**arrays)
    np.testing.assert_allclose(case_call(case, implementation)(**arrays), want, atol=3e-6)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("xla", jnp.bfloat16), ("pallas_interpret", jnp.bfloat16), ("pallas_interpret", jnp.float16)],
)
def test_16_bits(implementation: str, dtype: Any) -> None:
    arrays = OP.draw(CASES["user_prefix"], dtype)
    exact = {n: a.astype(jnp.float32) if a.dtype == dtype else a for n, a in arrays.items()}
    got = case_call("user_prefix", implementation)(**arrays)
    assert got.dtype == dtype
    want, naive = (case_call("user_prefix", "reference")(**x) for x in (exact, arrays))
    assert_as_close_as_naive(*(np.asarray(x, np.float32) for x in (got, want, naive)))


@st.composite
def anything(draw: st.DrawFn) -> tuple[Tokens, Tokens, Array, Array]:
    """Tokens of queries and of keys without any order, what each query sees (some are repaired), and windows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    requests, segments, orders = (draw(st.integers(1, n)) for n in (3, 8, 60))
    layouts = np.stack([x.bits for x in LAYOUTS.values()])

    def tokens() -> Tokens:
        shape = (1, SIZE)
        request = rng.integers(-1, requests, shape)
        segment, order = rng.integers(0, segments, shape), rng.integers(0, orders, shape)
        if draw(st.booleans()):
            request, segment, order = (np.sort(x, axis=1) for x in (request, segment, order))
        kind = rng.integers(0, len(Kind), shape)
        return Tokens(*(x.astype(np.int32) for x in (request, segment, kind, order, order)))

    queries, keys = tokens(), tokens()
    sees = layouts[rng.integers(0, len(layouts), queries.kind.shape), queries.kind]
    window = np.where(rng.random(sees.shape) < draw(st.floats(0, 1)), 2**30, rng.integers(0, 30, sees.shape))
    repaired = (queries.kind == Kind.ITEM) & (rng.random(sees.shape) < draw(st.floats(0, 1)))
    return queries, keys, np.where(repaired, REPAIRED_ITEM, sees), window.astype(np.int32)


def rule(queries: Tokens, keys: Tokens, sees: Array, window: Array) -> Array:
    """[B, T, S], pair by pair."""
    mask = np.zeros((1, SIZE, SIZE), bool)
    for b, i, j in np.ndindex(mask.shape):
        q, k = (Tokens(*(int(x[b, at]) for x in side)) for side, at in ((queries, i), (keys, j)))
        own = q.segment == k.segment and k.order <= q.order
        anywhere = sees[b, i] >> k.kind & 1
        earlier = sees[b, i] >> (16 + k.kind) & 1 and k.segment < q.segment
        near = q.order - k.order <= window[b, i]
        mask[b, i, j] = q.request == k.request >= 0 and near and (own or anywhere or earlier)
    return mask


@settings(max_examples=15, deadline=None)
@given(anything())
def test_any_vectors(drawn: tuple[Tokens, Tokens, Array, Array]) -> None:
    arrays = values(drawn[0])
    want = loop(*arrays, rule(*drawn))
    for form in FORMS:
        np.testing.assert_allclose(
            attend(form, arrays, drawn[0], drawn[2], drawn[1], drawn[3]), want, atol=3e-6
        )


def vectors_only(tokens: Tokens, layout: Any, **given: Any) -> Arguments:
    """A call whose queries, keys and values are not looked at."""
    rows, count = tokens.request.shape
    unused = jnp.zeros((rows, 1, count, 1))
    return Arguments(jnp.zeros((rows, count, 1, 1)), unused, unused, tokens, layout, **given)


@jax.jit
def relate(queries: Tokens, sees: Any, keys: Tokens, window: Any) -> jax.Array:
    prepared, (source,) = visibility.prepare(vectors_only(queries, sees, keys=keys, window=window))
    return visibility.relation(prepared, source.keys, 8, 4)


@settings(max_examples=25, deadline=None)
@given(anything())
def test_blocks_are_left_out_only_where_nothing_is_seen(
    drawn: tuple[Tokens, Tokens, Array, Array],
) -> None:
    queries, keys, sees, window = drawn
    related = np.asarray(relate(queries, sees, keys, window))
    mask = rule(*drawn)
    for b, i, j in np.ndindex(related.shape):
        rows = mask[b, 8 * i : 8 * i + 8, 4 * j : 4 * j + 4][queries.request[b, 8 * i : 8 * i + 8] >= 0]
        assert related[b, i, j] != visibility.NOTHING or not rows.any()
        assert related[b, i, j] != visibility.ALL or (
            rows.all() and (keys.request[b, 4 * j : 4 * j + 4] >= 0).all()
        )


def blocks_of(tokens: Tokens, layout: Layout, size: int) -> Array:
    @jax.jit
    def related(tokens: Tokens) -> jax.Array:
        prepared, (source,) = visibility.prepare(vectors_only(tokens, layout))
        return visibility.relation(prepared, source.keys, size, size)

    return np.asarray(related(tokens))[0]


def test_blocks_that_are_visited() -> None:
    causal = blocks_of(one_row(row([[(Kind.USER, 64)], [(Kind.USER, 64)]])), CAUSAL, 16)
    both = np.kron(np.eye(2, dtype=int), np.tril(np.full((4, 4), visibility.ALL)) - np.eye(4, dtype=int))
    np.testing.assert_array_equal(causal, both)
    items = blocks_of(one_row(row([items_first(32, (8,) * 8)])), ITEM_PREFIX, 16)
    some, all_ = visibility.SOMETHING, visibility.ALL
    np.testing.assert_array_equal(items[:4, :4], some * np.eye(4))
    np.testing.assert_array_equal(items[4:, :4], np.full((2, 4), all_))
    np.testing.assert_array_equal(items[4:, 4:], [[some, 0], [all_, some]])
    assert (items[:4, 4:] == visibility.NOTHING).all()


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
@pytest.mark.parametrize("case", ["cached_causal", "targets_window"])
def test_padding_has_no_effect(case: str, implementation: str) -> None:
    arrays, call = OP.draw(CASES[case], jnp.float32), case_call(case, implementation)
    clean = call(**arrays)
    dirty = dict(arrays)
    for prefix in ("", "context_") if "context_k" in arrays else ("",):
        count = arrays[prefix + "k"].shape[2]
        if prefix + "lengths" in arrays:
            real = np.arange(count) < np.asarray(arrays[prefix + "lengths"])[:, None]
        else:
            real = np.asarray(arrays[prefix + "request"]) >= 0
        for name in ("k", "v"):
            dirty[prefix + name] = jnp.where(real[:, None, :, None], arrays[prefix + name], jnp.nan)
        if not prefix:
            dirty["q"] = jnp.where(real[:, :, None, None], arrays["q"], jnp.nan)
            assert not real.all()
            assert (np.asarray(clean)[~real] == 0).all()
    np.testing.assert_array_equal(call(**dirty), clean)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, SIZE), st.sampled_from(sorted(LAYOUTS)))
def test_a_cached_context_changes_nothing(cut: int, layout: str) -> None:
    """Whatever part of a prompt is cached; the context's room stays the same, so that one program serves all cuts."""
    size = SIZE
    prompt = items_first(20, (4, 3, 12), 9) if layout == "item_prefix" else user_first(20, (4, 3, 12), 9)
    if layout == "single_user_multi_item":
        prompt = ((Kind.CONTEXT, 3), (Kind.USER, 36), *(((Kind.ITEM, 1),) * 9))
    tokens = one_row(row([prompt]))
    q, k, v = values(tokens)
    whole = attend("reference", (q, k, v), tokens, LAYOUTS[layout].bits[tokens.kind])

    def part(x: Any, axis: int, start: int, stop: int) -> Any:
        x = np.take(np.asarray(x), np.arange(start, stop), axis)
        return np.pad(x, [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])

    def some(start: int, stop: int) -> Tokens:
        fields = Tokens(*(part(x, 1, start, stop) for x in tokens))
        return fields._replace(request=np.where(np.arange(size) < stop - start, fields.request, -1))

    context = Context(part(k, 2, 0, cut), part(v, 2, 0, cut), some(0, cut))
    new = (part(q, 1, cut, size), part(k, 2, cut, size), part(v, 2, cut, size))
    sees = LAYOUTS[layout].bits[some(cut, size).kind]
    for form in ("xla", "pallas_interpret"):
        got = COMPILED[form](Arguments(*new, some(cut, size), sees, context=context))
        np.testing.assert_allclose(got[:, : size - cut], whole[:, cut:], atol=2e-6)


@pytest.mark.parametrize("form", ["xla", "pallas_interpret"])
def test_packed_equals_padded_in_any_order(form: str) -> None:
    prompts = [items_first(6, (3, 1, 4), 2), items_first(3, (2, 2), 1), items_first(9, (5, 1), 1)]
    alone = [one_row(row([prompt], 16)) for prompt in prompts]
    padded = Tokens(*(np.concatenate(x) for x in zip(*alone, strict=True)))
    q, k, v = (np.asarray(x) for x in values(padded))
    together = attend("reference", (q, k, v), padded, ITEM_PREFIX.bits[padded.kind])
    for order in ([0, 1, 2], [2, 0, 1]):
        lengths = [sum(n for _, n in prompts[r]) for r in order]
        tokens = one_row(row([prompts[r] for r in order], SIZE))
        pack = [np.zeros((1, SIZE, 4, 16), np.float32), *np.zeros((2, 1, 2, SIZE, 16), np.float32)]
        ends = np.cumsum(lengths)
        for r, end, n in zip(order, ends, lengths, strict=True):
            pack[0][0, end - n : end] = q[r, :n]
            pack[1][0, :, end - n : end], pack[2][0, :, end - n : end] = k[r, :, :n], v[r, :, :n]
        packed = attend(form, pack, tokens, ITEM_PREFIX.bits[tokens.kind])
        for r, end, n in zip(order, ends, lengths, strict=True):
            np.testing.assert_allclose(packed[0, end - n : end], together[r, :n], atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_repaired_token_sees_the_earlier_items_too(form: str) -> None:
    prompt = items_first(4, (3, 3, 3), 2)
    tokens = one_row(row([prompt], SIZE))
    arrays, place = values(tokens), np.arange(SIZE, dtype=np.int32)
    mask = written_out("item_prefix", [prompt], SIZE)
    mask[4, :5], mask[8, :9] = True, True
    sees = np.where(np.isin(place, [4, 8])[None], REPAIRED_ITEM, ITEM_PREFIX.bits[tokens.kind])
    got = attend(form, arrays, tokens, sees)
    np.testing.assert_allclose(got, loop(*arrays, mask[None]), atol=2e-6)


def test_memory_grows_with_tokens_not_with_their_square() -> None:
    def temporary(count: int) -> int:
        shapes = [
            jax.ShapeDtypeStruct((1, *s), jnp.float32)
            for s in ((count, 4, 64), (4, count, 64), (4, count, 64))
        ]
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        call = jax.jit(lambda q, k, v, n: xla.run(Arguments(q, k, v, Causal(n))))
        compiled = call.lower(*shapes, lengths).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    small, large = temporary(2048), temporary(8192)
    assert large < 5 * small
    assert large < 4 * 4 * 8192 * 8192 / 16  # bytes of the scores of all heads


def test_gradients_of_causal_prompts() -> None:
    tokens = one_row(row([[(Kind.USER, 40)]]))
    q, k, v = values(tokens)
    lengths, weight = Causal(jnp.array([37])), jnp.asarray(np.random.default_rng(1).random((1, 40, 4, 16)))

    def loss(form: Any, *arrays: jax.Array) -> jax.Array:
        return (form(Arguments(*arrays, lengths)) * weight).sum()

    def blocks_of_16(given: Arguments) -> jax.Array:
        return xla.run(given, xla.Blocks(16))

    def gradients(form: Any) -> Any:
        return jax.jit(jax.grad(functools.partial(loss, form), (0, 1, 2)), compiler_options=CHEAP)(q, k, v)

    got, want = gradients(blocks_of_16), gradients(reference.segment_attention)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_is_refused() -> None:
    tokens = one_row(row([[(Kind.USER, 8)]]))
    q, k, v = values(tokens)
    lengths = Causal(jnp.array([8]))
    with pytest.raises(ValueError, match="both be Causal"):
        segment_attention(q, k, v, lengths, context=Context(k, v, tokens))
    with pytest.raises(ValueError, match="the layout must be CAUSAL"):
        segment_attention(q, k, v, lengths, ITEM_PREFIX)
    with pytest.raises(ValueError, match="cannot run: the head size is 24"):
        segment_attention(*values(tokens, dim=24), tokens, implementation="pallas_interpret")
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        segment_attention(q, k, v, lengths, implementation="cuda")
    with pytest.raises(ValueError, match="2 kinds, 1 lengths"):
        describe([Kind.USER, Kind.ITEM], [3])


def test_every_form_takes_all_arguments() -> None:
    want = [p for p in inspect.signature(segment_attention).parameters if p != "implementation"]
    assert list(Arguments._fields) == want
    for implementation in op.IMPLEMENTATIONS:
        (call,) = inspect.signature(implementation.call, eval_str=True).parameters.values()
        assert call.annotation is Arguments


def test_work_counts_the_pairs_that_see_each_other() -> None:
    @functools.partial(jax.jit, static_argnames="layout", compiler_options=CHEAP)
    def seen_pairs(tokens: Tokens, layout: Layout) -> jax.Array:
        queries, (source,) = visibility.prepare(vectors_only(tokens, layout))
        rows, columns = (jax.tree.map(lambda x: x[:, :, None], queries), source.keys)
        return visibility.visible(rows, jax.tree.map(lambda x: x[:, None], columns))

    for case in (CASES[name] for name in ("cached_causal", "item_prefix_packed", "targets_window")):
        tokens, cached = batch(case)
        seen = seen_pairs(tokens, LAYOUTS[case.shape["layout"]])
        expected = 4 * case.shape["heads"] * case.shape["dim"] * int(seen[:, cached:].sum())
        assert OP.work(case, jnp.float32).flops == expected, case.name
