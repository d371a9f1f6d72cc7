# SPDX-License-Identifier: Apache-2.0
"""Biased attention: every form against Meta's operator and layers (all mask variants, cached, with times), against the
formula in float64 over any tokens, tables and scales; gradients; contexts, padding and blocks without effect."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.ops.biased_attention import Bias, Causal, Context, biased_attention, pallas_triton, reference, xla
from jgr.ops.biased_attention.bias import Arguments, Problem, bucket, prepare
from jgr.ops.biased_attention.cases import OP
from jgr.prompt.layouts import LAYOUTS, SINGLE_USER_MULTI_ITEM, Kind, Tokens
from tests.ops.closeness import assert_as_close_as_naive
from tests.ops.model_14 import single_user

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "hstu"
FORMS = ("reference", "xla", "pallas_interpret")
CASES = {case.name: case for case in OP.tagged("ci")}
FAR = 2**30
ROWS, COUNT, HEADS, DIM, DIVISOR = 5, 26, 2, 16, 24.0  # of `attend`; those of the golden operator
Array = np.ndarray[Any, Any]

# Compiled once a shape; interpreted kernels are slow to compile.
CHEAP: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def in_form(form: str, problem: Problem) -> jax.Array:
    """In small blocks, so that there are several."""
    if form == "reference":
        return reference.biased_attention(problem)
    if form == "xla":
        return xla.run(problem, xla.Blocks(8, 12, 1))
    return pallas_triton.run(problem, pallas_triton.Tiles(16, 16, 1, 1), interpret=True)


def test_a_gpu_computes_a_whole_batch_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's turns fit its cache; on a GPU 64 of them would cost 64 times the kernels' launches."""
    assert xla.choose_blocks(128, 2, 200, 200) == xla.Blocks(200, 200, 2)
    monkeypatch.setattr(xla, "target_platform", lambda: "gpu")
    assert xla.choose_blocks(128, 2, 200, 200) == xla.Blocks(200, 200, 128)


@functools.cache
def compiled(form: str, activation: str) -> Any:
    """With every option in use."""

    def call(
        arrays: Any, tokens: Any, keys: Any, sees: Any, window: Any, bias: Any, times: Any, scale: Any
    ) -> jax.Array:
        divisor = DIVISOR if activation == "silu" else 1.0
        options: Any = (bias, *times, activation, scale, divisor)
        return in_form(form, prepare(Arguments(*arrays, tokens, sees, keys, None, window, *options)))

    return jax.jit(call, compiler_options=CHEAP)


def attend(
    form: str,
    arrays: Any,
    tokens: Tokens,
    keys: Tokens | None = None,
    *,
    sees: Array | None = None,
    window: Array | None = None,
    bias: Bias | None = None,
    times: Any = None,
    scale: Any = 1.0,
    activation: str = "silu",
) -> Array:
    """q [5, 26, 2, 16], k, v [5, 2, 26, 16]."""
    shape = (ROWS, COUNT)
    bias = bias or Bias(np.zeros((1, HEADS, 15), np.float32), np.zeros((1, 1, 129), np.float32))
    return np.array(
        compiled(form, activation)(
            arrays,
            tokens,
            tokens if keys is None else keys,
            SINGLE_USER_MULTI_ITEM.bits[tokens.kind] if sees is None else sees,
            np.full(shape, FAR, np.int32) if window is None else window,
            Bias(*(np.broadcast_to(x, (ROWS, *x.shape[-2:])) for x in bias)),
            (np.zeros(shape, np.int32),) * 2 if times is None else times,
            np.broadcast_to(np.asarray(scale, np.float32), (ROWS, HEADS)),
        )
    )


def stacked(rows: list[Tokens]) -> Tokens:
    """Filled up with padding."""

    def fill(x: Array, value: int) -> Array:
        return np.pad(x, (0, COUNT - len(x)), constant_values=value)

    rows = [*rows, *[rows[0]._replace(request=np.full_like(rows[0].request, -1))] * (ROWS - len(rows))]
    filled = [Tokens(fill(t.request, -1), *(fill(x, 0) for x in t[1:])) for t in rows]
    return Tokens(*(np.stack(x) for x in zip(*filled, strict=True)))


def padded(x: Array, offsets: Array) -> Array:
    """Jagged [S, H, d] -> [5, 26, 2, 16], zeros elsewhere."""
    out = np.zeros((ROWS, COUNT, HEADS, DIM), np.float32)
    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        out[row, : stop - start, :, : x.shape[2]] = x[start:stop]
    return out


def golden_tokens(golden: Any, uses: Array) -> tuple[Tokens, Array]:
    """Meta's indices, and the window of each token. uses: targets, window, contextual slots, rows without a window."""
    targets_used, reach, contextual, full = (int(x) for x in [*uses, 0][:4])
    rows, windows = [], np.full((ROWS, COUNT), FAR, np.int32)
    for row, (length, count) in enumerate(zip(golden["lengths"], golden["num_targets"], strict=True)):
        targets, slots = int(count) if targets_used else 0, min(contextual, int(length))
        tokens, window = single_user(
            slots, int(length) - targets - slots, targets, max_attention=reach, full_rows=full
        )
        rows.append(tokens)
        if window is not None:
            windows[row, :length] = window
    return stacked(rows), windows


@pytest.mark.parametrize("form", FORMS)
def test_metas_operator_with_all_its_masks(form: str) -> None:
    golden = np.load(GOLDEN / "attention_op.npz")
    q, k, v = (padded(golden[name], golden["seq_offsets"]) for name in "qkv")
    arrays = (q, k.swapaxes(1, 2), v.swapaxes(1, 2))
    assert len(golden["variants"]) == 10
    for name in golden["variants"]:
        tokens, window = golden_tokens(golden, golden[f"{name}_uses"])
        got = attend(form, arrays, tokens, window=window, scale=golden["alpha"])
        got *= DIVISOR / golden[f"{name}_max_seq_len"]
        want = padded(golden[f"{name}_out"], golden["seq_offsets"])
        np.testing.assert_allclose(got, want, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_metas_operator_with_a_cache(form: str) -> None:
    golden = np.load(GOLDEN / "cached_attention_op.npz")
    new, offsets = int(golden["delta_size"]), golden["seq_offsets"]
    k, v = (padded(golden[name], offsets).swapaxes(1, 2) for name in "kv")
    every = np.arange(0, new * len(offsets), new)
    q = padded(golden["delta_q"], every)
    assert len(golden["variants"]) == 6
    for name in golden["variants"]:
        keys, windows = golden_tokens(golden, golden[f"{name}_uses"])
        # The last tokens of each row ask.
        at = np.zeros((ROWS, COUNT), np.int64)
        at[: len(every) - 1, :new] = golden["lengths"][:, None] - new + np.arange(new)
        asks = np.arange(COUNT) < new
        tokens = Tokens(*(np.take_along_axis(x, at, 1) for x in keys))
        tokens = tokens._replace(request=np.where(asks, tokens.request, -1))
        window = np.take_along_axis(windows, at, 1)
        got = attend(form, (q, k, v), tokens, keys, window=window, scale=golden["alpha"])
        got *= DIVISOR / golden["max_seq_len"]
        np.testing.assert_allclose(got, padded(golden[f"{name}_out"], every), atol=2e-6, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_metas_layer_with_times(form: str) -> None:
    golden = np.load(GOLDEN / "research_stack.npz")
    q, k, v = (golden[f"layer0_{name}"] for name in "qkv")
    lengths = golden["lengths"].astype(np.int32)
    times = (golden["timestamps"] - golden["timestamps"][:, :1]).astype(np.int32)
    following = np.concatenate([times[:, 1:], times[:, -1:]], axis=1)
    bias = Bias(golden["layer0_pos_w"][None], golden["layer0_ts_w"][None])

    def call(q: Any, k: Any, v: Any) -> jax.Array:
        options: Any = (bias, following, times, "silu", 1.0, float(golden["max_seq_len"]))
        arguments: Any = (Causal(lengths), SINGLE_USER_MULTI_ITEM, None, None, None)
        problem = prepare(Arguments(q, k.swapaxes(1, 2), v.swapaxes(1, 2), *arguments, *options))
        if form == "xla":
            return xla.run(problem, xla.Blocks(7, 7, 2))  # the diagonals need equal blocks
        return in_form(form, problem)

    got = np.asarray(jax.jit(call, compiler_options=CHEAP)(q, k, v)).reshape(golden["layer0_attn"].shape)
    real = np.arange(got.shape[1]) < lengths[:, None]
    np.testing.assert_allclose(got, np.where(real[..., None], golden["layer0_attn"], 0.0), atol=2e-6)


def test_buckets_of_model_7() -> None:
    seconds = np.array([0, 1, -1, 2, 60, -3600, 86400, 2**31 - 1, -(2**31) + 1], np.int32)
    want = [int(np.log(max(1, abs(int(x)))) / 0.301) for x in seconds]
    np.testing.assert_array_equal(bucket(jnp.asarray(seconds), 129), want)
    np.testing.assert_array_equal(bucket(jnp.asarray(seconds), 20), np.minimum(want, 19))


def by_hand(arrays: Any, seen: Array, bias: Array, scale: Array, activation: str) -> Array:
    """seen [B, T, S], bias [B, H, T, S], scale [B, H]; in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in arrays)
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, h in np.ndindex(q.shape[:3]):
        at = np.flatnonzero(seen[b, t])
        product, added = k[b, h, at] @ q[b, t, h], bias[b, h, t, at]
        if activation == "silu":
            logits = product * scale[b, h] + added
            weights = logits / (1 + np.exp(-logits)) / DIVISOR
        else:
            logits = (product + added) * scale[b, h]
            weights = np.exp(logits - logits.max(initial=-1e9))
            weights /= max(weights.sum(), 1e-300)
        out[b, t, h] = weights @ v[b, h, at]
    return out


def biases_by_hand(bias: Bias, tokens: Tokens, keys: Tokens, times: Any) -> Array:
    """[B, H, T, S], pair by pair."""
    assert bias.times is not None
    positions, ages = (np.broadcast_to(x, (ROWS, HEADS, x.shape[-1])) for x in bias)
    out = np.zeros((ROWS, HEADS, COUNT, COUNT))
    middle = positions.shape[2] // 2
    for b, t, s in np.ndindex((ROWS, COUNT, COUNT)):
        at = min(max(middle + int(keys.position[b, s]) - int(tokens.position[b, t]), 0), 2 * middle)
        away = abs(int(times[0][b, t]) - int(times[1][b, s]))
        out[b, :, t, s] = positions[b, :, at] + ages[b, :, min(int(np.log(max(1, away)) / 0.301), 128)]
    return out


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["silu", "softmax"]))
def test_any_tokens_tables_and_scales(seed: int, activation: str) -> None:
    """Tokens of several requests without any order; a table for each row and head; a scale for each row and head."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, COUNT)

    def some() -> Tokens:
        bounds = ((-1, 3), (0, 4), (0, len(Kind)), (0, 30), (0, 30))
        return Tokens(*(rng.integers(*b, shape).astype(np.int32) for b in bounds))

    def normal(*sizes: int) -> Array:
        return rng.standard_normal(sizes).astype(np.float32)

    tokens, keys = some(), some()
    keys.request[0] = -1  # nothing to see
    sees = np.stack([x.bits for x in LAYOUTS.values()])[rng.integers(0, 4, shape), tokens.kind]
    window = rng.choice([FAR, 10], shape).astype(np.int32)
    bias = Bias(normal(ROWS, HEADS, 15), normal(ROWS, 1, 129))
    times: Any = [rng.choice(10 ** rng.integers(0, 10, 40), shape).astype(np.int32) for _ in range(2)]
    scale = rng.uniform(0.2, 2.0, (ROWS, HEADS)).astype(np.float32)
    arrays = (normal(ROWS, COUNT, HEADS, DIM), *normal(2, ROWS, HEADS, COUNT, DIM))

    q, k = (Tokens(*(np.expand_dims(x, axis) for x in side)) for side, axis in ((tokens, 2), (keys, 1)))
    bits = sees[:, :, None]
    seen = (q.segment == k.segment) & (k.order <= q.order) | (bits >> k.kind & 1 == 1)
    seen |= (bits >> 16 + k.kind & 1 == 1) & (k.segment < q.segment)
    seen &= (q.request == k.request) & (k.request >= 0) & (q.order - k.order <= window[:, :, None])
    want = by_hand(arrays, seen, biases_by_hand(bias, tokens, keys, times), scale, activation)
    for form in FORMS:
        options: Any = dict(sees=sees, window=window, bias=bias, times=times, scale=scale)
        got = attend(form, arrays, tokens, keys, activation=activation, **options)
        assert (got[0] == 0).all() and (got[tokens.request < 0] == 0).all()
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=form)


@functools.cache
def case_call(case: str, implementation: str) -> Any:
    call = functools.partial(OP.call, **OP.options(CASES[case]), implementation=implementation)
    return jax.jit(call, compiler_options=CHEAP)


@pytest.mark.parametrize("case", CASES)
def test_cases_equal_the_reference(case: str) -> None:
    arrays = OP.draw(CASES[case], jnp.float32)
    want = case_call(case, "reference")(**arrays)
    for form in ("xla", "pallas_interpret"):
        np.testing.assert_allclose(case_call(case, form)(**arrays), want, atol=5e-6, err_msg=form)


def test_16_bits() -> None:
    case = "hstu"
    arrays = OP.draw(CASES[case], jnp.bfloat16)
    exact = {n: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for n, a in arrays.items()}
    want, naive = (np.asarray(case_call(case, "reference")(**x), np.float32) for x in (exact, arrays))
    for form in ("xla", "pallas_interpret"):
        got = case_call(case, form)(**arrays)
        assert got.dtype == jnp.bfloat16
        assert_as_close_as_naive(np.asarray(got, np.float32), want, naive)


@pytest.mark.parametrize("form", FORMS)
def test_padding_has_no_effect(form: str) -> None:
    arrays, call = OP.draw(CASES["hstu"], jnp.float32), case_call("hstu", form)
    clean = np.asarray(call(**arrays))
    real = np.arange(clean.shape[1]) < np.asarray(arrays["lengths"])[:, None]
    dirty = arrays | {"q": jnp.where(real[..., None, None], arrays["q"], jnp.nan)}
    dirty |= {name: jnp.where(real[:, None, :, None], arrays[name], jnp.nan) for name in "kv"}
    np.testing.assert_array_equal(call(**dirty), clean)
    assert (clean[~real] == 0).all() and not real.all()


def test_a_cached_history_changes_nothing() -> None:
    """MODEL-13: the targets of a whole prompt, and with the history as context, its times and positions in front."""
    history, targets = 17, 9
    tokens = stacked([single_user(0, history, targets)[0]] * ROWS)
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((ROWS, HEADS, COUNT, DIM)).astype(np.float32) for _ in range(3))
    q = q.swapaxes(1, 2)
    events = np.sort(rng.integers(0, 10**7, (ROWS, COUNT)).astype(np.int32), axis=1)
    bias = Bias(*(rng.standard_normal((1, HEADS, n)).astype(np.float32) for n in (31, 129)))
    whole = attend("reference", (q, k, v), tokens, bias=bias, times=(events, events))

    known, asked = (Tokens(*(x[:, part] for x in tokens)) for part in (np.s_[:history], np.s_[history:]))
    context = Context(k[:, :, :history], v[:, :, :history], known)
    for form in ("xla", "pallas_interpret"):

        @functools.partial(jax.jit, compiler_options=CHEAP)
        def call(q: Any, k: Any, v: Any, form: str = form) -> jax.Array:
            options: Any = (bias, events[:, history:], events, "silu", 1.0, DIVISOR)
            problem = prepare(
                Arguments(q, k, v, asked, SINGLE_USER_MULTI_ITEM, None, context, None, *options)
            )
            return in_form(form, problem)

        got = call(q[:, history:], k[:, :, history:], v[:, :, history:])
        np.testing.assert_allclose(got, whole[:, history:], atol=3e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients(causal: bool) -> None:
    """In blocks, and of rows in groups: HSTU's with the diagonals of its table, Climber's with tables of every row."""
    rng = np.random.default_rng(0)
    batch, count, history = 4, 20, 14

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    q, k, v = normal(batch, count, 2, 8), normal(batch, 2, count, 8), normal(batch, 2, count, 6)
    if causal:
        tokens: Any = Causal(jnp.array([20, 0, 11, 17]))
        bias, scale, activation, divisor = Bias(normal(1, 25), normal(1, 129)), jnp.array(0.7), "silu", 8.0
    else:
        described = single_user(0, history, count - history)[0]
        tokens = Tokens(*(np.stack([x] * batch) for x in described))
        tokens.request[1, 17:] = -1
        bias = Bias(normal(batch, 2, 25), normal(2, 129))
        scale, activation, divisor = jnp.abs(normal(batch, 2)) + 0.2, "softmax", 1.0
    events = jnp.asarray(np.sort(rng.integers(0, 10**6, (batch, count + 1)), axis=1), jnp.int32)
    weight = normal(batch, count, 2, 6)

    def loss(form: Any, q: Any, k: Any, v: Any, bias: Any, scale: Any) -> jax.Array:
        options: Any = (bias, events[:, 1:], events[:, :-1], activation, scale, divisor)
        call = Arguments(q, k, v, tokens, SINGLE_USER_MULTI_ITEM, None, None, None, *options)
        return (form(prepare(call)) * weight).sum()

    def gradients(form: Any) -> Any:
        found = jax.jit(jax.grad(functools.partial(loss, form), (0, 1, 2, 3, 4)), compiler_options=CHEAP)
        return jax.tree.leaves(found(q, k, v, bias, scale))

    want = gradients(reference.biased_attention)
    for blocks in (xla.Blocks(8, 8, 2), xla.Blocks(20, 20, 4)) if causal else (xla.Blocks(8, 12, 2),):
        for a, b in zip(gradients(functools.partial(xla.run, blocks=blocks)), want, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5)


def test_no_array_of_all_pairs_exists_at_16k_tokens() -> None:
    """Neither forwards nor backwards, with both tables."""
    count, heads, dim = 16384, 2, 32
    shapes = {"q": (1, count, heads, dim), "k": (1, heads, count, dim), "v": (1, heads, count, dim)}
    arguments = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (*shapes.values(), (1, 2047), (1, 129))]
    integers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1,), (1, count), (1, count))]

    def loss(
        q: Any, k: Any, v: Any, positions: Any, ages: Any, lengths: Any, asked: Any, happened: Any
    ) -> Any:
        bias = Bias(positions, ages)
        times: Any = dict(query_times=asked, key_times=happened)
        out = biased_attention(
            q, k, v, Causal(lengths), bias=bias, activation="silu", divisor=9.0, implementation="xla", **times
        )
        return (out * out).sum()

    both = jax.jit(jax.value_and_grad(loss, tuple(range(5))), compiler_options=CHEAP)
    memory = both.lower(*arguments, *integers).compile().memory_analysis()
    assert memory.temp_size_in_bytes < count * count / 4  # a byte of every fourth pair


def test_what_is_refused() -> None:
    lengths = Causal(jnp.array([8]))
    q, k = jnp.ones((1, 8, 2, 16)), jnp.ones((1, 2, 8, 16))
    bias = Bias(jnp.ones((1, 15)), jnp.ones((1, 129)))
    with pytest.raises(ValueError, match=r"they must be \[1, 8\], .* not none"):
        biased_attention(q, k, k, lengths, bias=bias)
    with pytest.raises(ValueError, match=r"they must be \[1, 8\], .* not \[1, 7\]"):
        biased_attention(q, k, k, lengths, bias=bias, query_times=jnp.ones((1, 7), jnp.int32))
    with pytest.raises(ValueError, match="activation is 'relu'"):
        biased_attention(q, k, k, lengths, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"divisor is 2\.0"):
        biased_attention(q, k, k, lengths, divisor=2.0)
    with pytest.raises(ValueError, match="cannot run: the value head size is 12"):
        biased_attention(q, k, k[..., :12], lengths, implementation="pallas_interpret")


def test_work_counts_the_products_of_the_pairs_that_see_each_other() -> None:
    pairs = 40 * 41 / 2 + 9 * 41  # a history, and targets that see it and themselves
    assert OP.work(CASES["climber"], jnp.float32).flops == 4 * 4 * 32 * pairs
    pairs = sum(n * (n + 1) / 2 for n in (19, 12, 1))
    assert OP.work(CASES["hstu"], jnp.float32).flops == 2 * 2 * (16 + 32) * pairs
