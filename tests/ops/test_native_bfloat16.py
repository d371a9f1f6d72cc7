# SPDX-License-Identifier: Apache-2.0
"""The kernels for bfloat16 on processors with AMX: against loops in float64 and the references in float32, for the same
numbers; padding has no effect; calls that do not fit are errors; what the library has no kernels for is left to XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.models import decoder, params
from jgr.models.generators import laid_out
from jgr.models.kv import BeamKV
from jgr.ops import decoder_layer, native
from jgr.ops.beam_attention.arguments import Arguments as OfBeams
from jgr.ops.beam_attention.cases import OP as OF_BEAMS
from jgr.ops.decoder_layer.cases import OF_INPUTS, OF_OUTPUT
from jgr.ops.dense import dense
from jgr.ops.quantized import Quantized
from jgr.ops.segment_attention import Arguments, Causal, segment_attention
from jgr.ops.segment_attention import native as attention_form
from jgr.ops.segment_attention.cases import OP
from jgr.ops.testing import Case, OpCases
from jgr.ops.tiled import Tiled, tiled
from jgr.ops.token_logits import token_logits
from jgr.ops.token_logits.cases import OP as OF_LOGITS
from jgr.prompt.layouts import Tokens
from tests.native import installed
from tests.noise import noisy
from tests.ops.test_beam_attention import loop as beams_by_loop
from tests.ops.test_native import MANY
from tests.ops.test_segment_attention import CHEAP, anything, loop, rule, values

Array = np.ndarray[Any, Any]

pytestmark = [pytest.mark.native, pytest.mark.amx]

HALF = jnp.bfloat16
STEP = 2.0**-8
"""The largest relative error of a number that is rounded to bfloat16."""
LAYER = dict(hidden=90, heads=6, kv_heads=2, dim=64, mlp=70)
ROWS = (
    Case("plain", dict(rows=(3, 31), with_=(), **LAYER)),
    Case("biases", dict(rows=(1, 67), with_=("bq", "bk", "bv"), **{**LAYER, "kv_heads": 1, "dim": 32})),
    Case("norms", dict(rows=(2, 100), with_=("q_norm", "k_norm"), **{**LAYER, "hidden": 600, "mlp": 1100})),
    Case("one_row", dict(rows=(1, 1), with_=("q_norm", "k_norm"), **LAYER)),
)
BEAMS = (
    Case("many", {**MANY, "dim": 32}),
    Case("few", dict(tokens=5, lengths=(5,), width=2, slots=1, heads=2, kv_heads=1, dim=96)),
)
OPS: dict[str, tuple[OpCases, tuple[Case, ...]]] = {
    "attention_inputs": (OF_INPUTS, ROWS),
    "layer_output": (OF_OUTPUT, ROWS),
    "segment_attention": (OP, tuple(case for case in OP.tagged("ci") if case.shape["dim"] % 32 == 0)),
    "token_logits": (
        OF_LOGITS,
        tuple(case for case in OF_LOGITS.tagged("ci") if case.shape["size"] % 32 == 0),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with installed():
        assert "bfloat16" in native.library().types
        yield


def wide(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x.astype(jnp.float32) if x.dtype == HALF else x for name, x in arrays.items()}


def near(got: Any, want: Any, steps: float = 2.0) -> None:
    """Within so many roundings of the largest numbers: sums of many products are as far off as their parts."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=steps * STEP * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{name}-{case.name}") for name, (op, cases) in OPS.items() for case in cases],
)
def test_cases_equal_the_reference(op: OpCases, case: Case) -> None:
    arrays, options = op.draw(case, HALF), op.options(case)

    def by(form: str) -> Callable[..., Any]:
        return jax.jit(functools.partial(op.call, **options, implementation=form), compiler_options=CHEAP)

    got, want = by("native")(**arrays), by("reference")(**wide(arrays))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == (jnp.float32 if op is OF_LOGITS else HALF)
        near(ours, theirs)


def test_logits_are_sums_in_float32() -> None:
    arrays = OF_LOGITS.draw(OF_LOGITS.cases[1], HALF)
    want = np.asarray(arrays["hidden"], np.float64) @ np.asarray(arrays["head"], np.float64).T
    np.testing.assert_allclose(token_logits(**arrays, implementation="native"), want, atol=2e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_matrices_in_8_bits(kind: str) -> None:
    """All numbers of a byte, in panels that are full and one that is not, against numpy's floats of them."""
    rng, (hidden, inner, mlp) = np.random.default_rng(0), (90, 64, 70)
    sizes = {"wo": (inner, hidden), "gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden)}
    matrices: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    for name, shape in sizes.items():
        stored = rng.integers(0, 256, (3, *shape)).astype(np.uint8)
        stored[stored & 127 == 127] = 5  # of fp8 these are no numbers
        stored = stored.view(np.int8) if kind == "int8" else stored
        numbers = (stored if kind == "int8" else stored.view(ml_dtypes.float8_e4m3fn)).astype(np.float32)
        scale = (rng.uniform(0.5, 1.5, (3, shape[1])) / (numbers.std() * np.sqrt(shape[0]))).astype(
            np.float32
        )
        matrices[name] = Quantized(jnp.asarray(stored), jnp.asarray(scale))
        floats[name] = jnp.asarray(numbers * scale[:, None])
    h, attended = (jnp.asarray(rng.standard_normal((2, 45, n)), HALF) for n in (hidden, inner))

    def call(w: dict[str, Any], form: str, dtype: Any) -> jax.Array:
        after = decoder_layer.OutputWeights(
            w["wo"], jnp.ones((3, hidden), dtype), w["gate"], w["up"], w["down"]
        )
        given = h.astype(dtype), attended.astype(dtype), after, jnp.int32(1)
        return decoder_layer.layer_output(*given, eps=1e-6, implementation=form)

    near(call(matrices, "native", HALF), call(floats, "reference", jnp.float32))


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_tiled_matrices_give_the_same(case: Case) -> None:
    """Bit by bit, since the library brings others into the same order; and by themselves in `dense`."""
    arrays = OF_OUTPUT.draw(case, HALF)
    h, attended, norm = (arrays.pop(name) for name in ("h", "attended", "norm"))
    matrices = {name: x / float(np.sqrt(x.shape[1])) for name, x in arrays.items()}
    tiles = {name: tiled(x) for name, x in matrices.items()}
    assert {name: x.shape for name, x in tiles.items()} == {name: x.shape for name, x in matrices.items()}

    def output(w: dict[str, Any]) -> jax.Array:
        after = decoder_layer.OutputWeights(norm=norm, **w)
        return decoder_layer.layer_output(h, attended, after, jnp.int32(1), eps=1e-6, implementation="native")

    np.testing.assert_array_equal(output(tiles), output(matrices))
    one = jax.tree.map(lambda x: x[1], tiles["wo"])
    near(dense(attended, one), np.asarray(attended, np.float64) @ np.asarray(matrices["wo"][1], np.float64))


def test_weights_are_tiled_when_they_are_laid_out(model: Decoder) -> None:
    """A decoder's matrices in bfloat16 and no others; prompts are the same, and so by XLA's attention."""
    cfg, weights = model
    laid = laid_out(weights)
    assert all(
        isinstance(getattr(laid.layers, name), Tiled)
        for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")
    )
    assert laid.embed is weights.embed and laid.layers.mlp_norm is weights.layers.mlp_norm
    assert laid_out(weights, devices=2) is weights
    whole = as_type(weights, np.float32)
    assert laid_out(whole) is whole

    tokens, lengths = jax.random.randint(jax.random.key(2), (2, 130), 0, 300), jnp.array([77, 130])
    prompts = jax.jit(decoder.prefill, static_argnums=1, static_argnames="attention", compiler_options=CHEAP)
    for ours, theirs in zip(
        jax.tree.leaves(prompts(laid, cfg, tokens, lengths)),
        jax.tree.leaves(prompts(weights, cfg, tokens, lengths)),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    plain = prompts(whole, cfg, tokens, lengths, attention="reference")
    by_xla = prompts(laid, cfg, tokens, lengths, attention="reference")
    real = (jnp.arange(130) < lengths[:, None])[..., None]
    near(jnp.where(real, by_xla.hidden, 0), jnp.where(real, plain.hidden, 0), 8.0)


@pytest.mark.parametrize("op", (OF_INPUTS, OF_OUTPUT), ids=lambda op: op.name)
def test_padding_of_a_layer_is_not_computed_and_has_no_effect(op: OpCases) -> None:
    drawn, real = op.draw(ROWS[0], HALF), np.random.default_rng(3).random((3, 31)) < 0.4
    real[1] = False
    moved = {name: x for name, x in drawn.items() if name in ("h", "attended", "cos", "sin")}

    def call(arrays: Any, **options: Any) -> list[Array]:
        made = op.call(**{**drawn, **arrays}, **op.options(ROWS[0]), implementation="native", **options)
        by_token = (x if x.shape[1] == 31 else x.swapaxes(1, 2) for x in jax.tree.leaves(made))
        return [np.asarray(x, np.float32) for x in by_token]

    want = call(moved)
    hidden = {
        name: jnp.where(real.reshape(3, 31, *[1] * (x.ndim - 2)), x, jnp.nan) for name, x in moved.items()
    }
    for got, whole in zip(call(hidden, real=jnp.asarray(real)), want, strict=True):
        np.testing.assert_array_equal(got[real], whole[real])
        assert not got[~real].any()


@jax.jit
def attend(call: Arguments) -> jax.Array:
    return attention_form.segment_attention(call)


@settings(max_examples=40, deadline=None)
@given(anything())
def test_any_vectors(drawn: tuple[Tokens, Tokens, Array, Array]) -> None:
    queries, keys, sees, window = drawn
    arrays = [x.astype(HALF) for x in values(queries, dim=32)]
    got = attend(Arguments(*arrays, queries, np.asarray(sees, np.int32), keys=keys, window=window))
    near(got, loop(*arrays, rule(*drawn)))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (5, 1, 64), (4, 4, 96)])
def test_long_prompts_and_what_stands_in_their_padding(heads: int, kv_heads: int, dim: int) -> None:
    """Heads of a group share blocks of queries, which need not end with a block."""
    rng, lengths = np.random.default_rng(1), np.array([389, 200], np.int32)
    shapes = ((2, 389, heads, dim), *[(2, kv_heads, 389, dim)] * 2)
    q, k, v = (np.array(rng.standard_normal(shape), ml_dtypes.bfloat16) for shape in shapes)
    causal = jax.jit(lambda *given: segment_attention(*given, Causal(lengths), implementation="native"))
    got, place = np.asarray(causal(q, k, v)), np.arange(389)
    real = place < lengths[:, None]
    mask = (place[:, None] >= place) & real[:, None] & real[:, :, None]
    near(got, loop(q, k, v, mask))
    for row, length in enumerate(lengths):
        q[row, length:] = k[row, :, length:] = v[row, :, length:] = np.nan
    again = np.asarray(causal(q, k, v))
    np.testing.assert_array_equal(again, got)
    assert not again[1, 200:].any()


@pytest.mark.parametrize("case", BEAMS, ids=lambda case: case.name)
def test_attention_of_beams_equals_the_loop(case: Case) -> None:
    from jgr.ops.beam_attention import native as form

    arrays = OF_BEAMS.draw(case, HALF)
    attend_beams = jax.jit(lambda given: form.beam_attention(OfBeams(**given)), compiler_options=CHEAP)
    got = np.asarray(attend_beams(arrays), np.float32)
    near(got, beams_by_loop(wide(arrays)))
    if case.name == "few":
        return
    moved = {name: np.array(x) for name, x in arrays.items()}
    for b, width in enumerate(arrays["widths"]):
        moved["ancestors"][b] %= max(width, 1)
    want = np.asarray(attend_beams(moved), np.float32)
    for b, (length, width) in enumerate(zip(arrays["lengths"], arrays["widths"], strict=True)):
        moved["context_k"][b, :, length:] = moved["context_v"][b, :, length:] = np.nan
        moved["q"][b, width:] = np.nan
        moved["beam_k"][b, :, width:] = moved["beam_v"][b, :, width:] = np.nan
        moved["ancestors"][b, :, width:] = [[-1], [2**31 - 1]] * 9
    np.testing.assert_array_equal(np.asarray(attend_beams(moved), np.float32), want)


FAMILIES = {
    "qwen2": dict(kv_heads=2, head_dim=64, hidden=48),
    "qwen3": dict(kv_heads=4, head_dim=32, hidden=64),
    "llama": dict(kv_heads=1, head_dim=96, hidden=72),
}
Decoder = tuple[decoder.DecoderConfig, Any]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Decoder:
    """A decoder and its weights in bfloat16."""
    sizes: dict[str, Any] = dict(vocab_size=300, layers=3, heads=4, mlp=100, rope_theta=1e4, norm_eps=1e-6)
    cfg = decoder.DecoderConfig(
        family=request.param, tied=True, max_position=512, **sizes, **FAMILIES[request.param]
    )
    weights = noisy(params.initialize(decoder.spec(cfg), jax.random.key(0)), 0.05)
    return cfg, as_type(weights, HALF)


def as_type(weights: Any, dtype: Any) -> Any:
    """By numpy: jax would compile a program for every shape."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(dtype)), weights)


def both(run: Callable[[Any], Any], weights: Any) -> tuple[str, list[Array], list[Array]]:
    """What XLA was given to compile for bfloat16, what that gave, and what the same weights give in float32 without the
    library."""
    program = jax.jit(run, compiler_options=CHEAP).lower(weights)
    got = program.compile()(weights)
    native.use(False)
    try:
        want = jax.jit(lambda w: run(w), compiler_options=CHEAP)(as_type(weights, np.float32))
    finally:
        native.use(True)
    assert all(x.dtype == HALF for x in jax.tree.leaves(got))
    return program.as_text(), *([np.asarray(x, np.float32) for x in jax.tree.leaves(y)] for y in (got, want))


@pytest.mark.parametrize("count", [1, 5])
def test_prompts_of_decoders(model: Decoder, count: int) -> None:
    """Last hidden states, keys and values."""
    cfg, weights = model
    tokens = jax.random.randint(jax.random.key(2), (count, 512), 0, 300)
    lengths = jnp.array([77, 512, 1, 130, 511])[:count]

    def run(weights: Any) -> Any:
        last, state = decoder.begin(weights, cfg, tokens, lengths)
        real = (jnp.arange(512) < lengths[:, None])[None, :, None, :, None]
        return last, [jnp.where(real, x, 0) for x in state.context]

    text, got, want = both(run, weights)
    assert all(f"jgr_native_{name}_bfloat16" in text for name in ("inputs", "attention", "output"))
    for ours, theirs in zip(got, want, strict=True):
        near(ours, theirs, 8.0)  # roundings of three layers


def test_beams_of_decoders(model: Decoder) -> None:
    """Hidden states, keys and values of a second token."""
    cfg, weights = model
    rng = np.random.default_rng(3)
    context = [rng.standard_normal((3, 2, cfg.kv_heads, 40, cfg.head_dim)) for _ in range(2)]
    earlier = [rng.standard_normal((3, 2, 5, cfg.kv_heads, cfg.head_dim)) for _ in range(2)]
    tokens, ancestors = rng.integers(0, 300, (2, 5)), rng.integers(0, 5, (2, 2, 5))
    ancestors[:, 1] = np.arange(5)

    def run(weights: Any) -> Any:
        dtype = weights.embed.dtype
        kept = decoder.ContextKV(*(jnp.asarray(x, HALF).astype(dtype) for x in context))
        own = BeamKV(*((jnp.asarray(x, HALF).astype(dtype),) for x in earlier))
        lengths = jnp.array([40, 7])
        given = jnp.asarray(tokens), kept, lengths, own, jnp.asarray(ancestors)
        hidden, own = decoder.decode(weights, cfg, *given)
        return hidden, own.k[1], own.v[1]

    text, got, want = both(run, weights)
    assert all(f"jgr_native_{name}_bfloat16" in text for name in ("inputs", "beam_attention", "output"))
    for ours, theirs in zip(got, want, strict=True):
        near(ours, theirs, 8.0)


def test_what_the_library_has_no_kernels_for_is_left_to_xla() -> None:
    def calls(dim: int, *types: Any) -> bool:
        shapes = (1, 4, 2, dim), (1, 2, 4, dim), (1, 2, 4, dim)
        arrays = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
        return (
            "jgr_native"
            in jax.jit(lambda *x: segment_attention(*x, Causal(jnp.array([4])))).lower(*arrays).as_text()
        )

    assert calls(32, HALF, HALF, HALF) and not calls(48, HALF, HALF, HALF)
    assert not calls(32, HALF, jnp.float32, jnp.float32) and not calls(32, *[jnp.float16] * 3)
    native.use(False)
    try:
        assert not calls(32, HALF, HALF, HALF)
    finally:
        native.use(True)


def test_shapes_that_do_not_fit_are_errors() -> None:
    q, kv = jnp.zeros((1, 4, 2, 32), HALF), jnp.zeros((1, 2, 4, 32), HALF)
    six, four = jnp.zeros((6, 1, 4), jnp.int32), jnp.zeros((4, 1, 4), jnp.int32)
    odd = jnp.zeros((1, 4, 2, 48), HALF), jnp.zeros((1, 2, 4, 48), HALF)
    hidden, head = jnp.zeros((3, 64), HALF), jnp.zeros((20, 64), HALF)
    logits = jax.ShapeDtypeStruct((3, 20), jnp.float32)
    room = native.arranged_size(kv.shape, HALF)
    wrong: list[tuple[str, list[Any], tuple[Any, ...], str]] = [
        ("attention", [q.shape, (room - 1,)], (q, kv, kv, six, four), "arranged is too small"),
        ("attention", [odd[0].shape, (2 * room,)], (odd[0], odd[1], odd[1], six, four), "multiple of 32"),
        ("attention", [q.shape, (room,)], (q, kv[:, :1], kv, six, four), r"v is \[1, 2, 4, 32\]"),
        ("dense", [(3, 20)], (hidden, head[:, 0]), r"packed is \[20\], and must be \[2048\]"),
        (
            "pack",
            [(2, 1023)],
            (jnp.zeros((2, 5, 7), HALF),),
            r"packed is \[2, 1023\], and must be \[2, 1024\]",
        ),
        ("token_logits", [logits, (32 * 64 - 1,)], (hidden, head), "arranged is too small"),
        ("token_logits", [logits, (32 * 64,)], (hidden, head[:, :32]), r"heads is \[20, 32\]"),
        ("token_logits", [logits, (32 * 64,)], (hidden, head[:5]), "16 heads|out is"),
    ]
    for name, made, arrays, message in wrong:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(native.call(name, made, *arrays))
