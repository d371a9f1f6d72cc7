# SPDX-License-Identifier: Apache-2.0
"""The kernels for CPUs, of every instruction set that this processor has: against loops in float64 and the references;
calls that do not fit are errors; padding has no effect; a library that cannot be used is left alone."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.models import decoder, params
from jgr.models.kv import BeamKV
from jgr.ops import decoder_layer, native
from jgr.ops.attention_mass import attention_mass
from jgr.ops.attention_mass.cases import OP as OF_MASS
from jgr.ops.beam_attention import beam_attention
from jgr.ops.beam_attention import native as beams_form
from jgr.ops.beam_attention.arguments import Arguments as OfBeams
from jgr.ops.beam_attention.cases import OP as OF_BEAMS
from jgr.ops.decoder_layer.cases import OF_INPUTS, OF_OUTPUT
from jgr.ops.quantized import Quantized
from jgr.ops.segment_attention import Arguments, Causal, segment_attention
from jgr.ops.segment_attention import native as attention_form
from jgr.ops.segment_attention.cases import OP
from jgr.ops.testing import Case, OpCases
from jgr.prompt.layouts import Tokens
from tests.native import installed
from tests.noise import noisy
from tests.ops.test_beam_attention import loop as beams_by_loop
from tests.ops.test_segment_attention import CHEAP, anything, loop, rule, values

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("native_library")]
Array = np.ndarray[Any, Any]
AVX2 = ("avx2", "fma")
NEEDED = {"generic": (), "avx2": AVX2, "avx512": (*AVX2, "avx512f", "avx512dq", "avx512bw", "avx512vl")}
"""The instruction sets of the library, and what a processor must have for each, as Linux names it."""
HAS = re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1]
SETS = [name for name, needed in NEEDED.items() if set(needed) <= set(" ".join(HAS).split())]
"""Those that this processor has: there is no test of another."""
OPS = (OP, OF_MASS, OF_INPUTS, OF_OUTPUT)
CASES = [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.tagged("ci")]


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set in use."""
    import jgr_native  # type: ignore[import-not-found]

    native.library()
    choose = jgr_native.library().jgr_native_choose
    assert choose(request.param.encode())
    yield request.param
    for name in SETS:  # the best again
        choose(name.encode())


def run(op: OpCases, case: Case, implementation: str) -> list[Array]:
    made = op.call(**op.draw(case, jnp.float32), **op.options(case), implementation=implementation)
    return [np.asarray(x) for x in jax.tree.leaves(made)]


@functools.cache
def both(name: str, case: str) -> tuple[Any, Any]:
    """A case's arrays, and the program of both forms; it is compiled once, for the library chooses when it runs."""
    op = next(op for op in OPS if op.name == name)
    chosen = next(found for found in op.cases if found.name == case)

    def call(given: Any) -> Any:
        return [
            op.call(**given, **op.options(chosen), implementation=form) for form in ("native", "reference")
        ]

    return op.draw(chosen, jnp.float32), jax.jit(call, compiler_options=CHEAP)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cases_equal_the_reference(kernels: str, op: OpCases, case: Case) -> None:
    arrays, program = both(op.name, case.name)
    got, want = program(arrays)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-5)


@functools.cache
def small(kind: Any) -> tuple[list[Array], Any]:
    """Both ops of a layer with matrices in 8 bits: what they give for numpy's floats of these, and their program."""
    rng, rows, hidden, heads, kv_heads, dim, mlp = np.random.default_rng(0), (2, 45), 90, 6, 2, 10, 70
    sizes = {
        "wq": (hidden, heads * dim), "wk": (hidden, kv_heads * dim), "wv": (hidden, kv_heads * dim),
        "wo": (heads * dim, hidden), "gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden),
    }  # fmt: skip
    matrices, floats = {}, {}
    for name, shape in sizes.items():
        values = rng.integers(0, 256, (3, *shape)).astype(np.uint8)
        values[values & 127 == 127] = 5  # of fp8 these are no numbers
        numbers = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if kind == "int8":
            values = values.view(np.int8)
            numbers = values.astype(np.float32)
        scale = rng.uniform(0.5, 1.5, (3, shape[1])).astype(np.float32) / (
            np.abs(numbers).std() * np.sqrt(shape[0])
        )
        matrices[name] = Quantized(jnp.asarray(values), jnp.asarray(scale.astype(np.float32)))
        floats[name] = jnp.asarray(numbers * scale[:, None].astype(np.float32))
    ones = jnp.ones((3, hidden))
    h, attended = (jnp.asarray(rng.standard_normal((*rows, n), np.float32)) for n in (hidden, heads * dim))
    angles = jnp.asarray(rng.standard_normal((*rows, 1, dim // 2), np.float32))

    def call(w: Any, form: str) -> list[Any]:
        given = h, decoder_layer.InputWeights(ones, w["wq"], w["wk"], w["wv"]), jnp.int32(1), jnp.cos(angles)
        of = {"eps": 1e-6, "implementation": form}
        made = decoder_layer.attention_inputs(*given, jnp.sin(angles), head=dim, **of)
        alone = decoder_layer.attention_inputs(*given, jnp.sin(angles), head=dim, queries=False, **of)
        after = decoder_layer.OutputWeights(w["wo"], ones, w["gate"], w["up"], w["down"])
        return [*made, *alone[1:], decoder_layer.layer_output(h, attended, after, jnp.int32(1), **of)]

    program = jax.jit(call, static_argnums=1, compiler_options=CHEAP)
    return [np.asarray(x) for x in program(floats, "reference")], functools.partial(program, matrices)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_matrices_in_8_bits_give_what_their_floats_give(kernels: str, kind: str) -> None:
    """All numbers of a byte, subnormal ones too, in panels that are full and one that is not."""
    want, program = small(kind)
    for ours, theirs in zip(program("native"), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("op", (OF_INPUTS, OF_OUTPUT), ids=lambda op: op.name)
def test_padding_of_a_layer_is_not_computed_and_has_no_effect(kernels: str, op: OpCases) -> None:
    """Padding anywhere: zeros come of it, whatever stands in it, and what is real gets the same as without it."""
    case = next(case for case in op.cases if case.name == "odd_sizes")
    given, real = op.draw(case, jnp.float32), np.random.default_rng(3).random((3, 31)) < 0.4
    real[1] = False
    moved = {name: np.array(x) for name, x in given.items() if name in ("h", "attended", "cos", "sin")}

    def call(arrays: Any, **options: Any) -> list[Array]:
        made = op.call(**{**given, **arrays}, **op.options(case), implementation="native", **options)
        # k and v are [B, K, T, d], all else [B, T, ...]
        return [np.asarray(x if x.shape[1] == 31 else x.swapaxes(1, 2)) for x in jax.tree.leaves(made)]

    want = call(moved)
    for x in moved.values():
        x[~real] = np.nan
    for got, whole in zip(call(moved, real=jnp.asarray(real)), want, strict=True):
        np.testing.assert_allclose(got[real], whole[real], rtol=1e-6, atol=1e-6)
        assert not got[~real].any()
    assert not any(x.any() for x in call(moved, real=jnp.zeros((3, 31), bool)))


@jax.jit
def attend(call: Arguments) -> jax.Array:
    return attention_form.segment_attention(call)


@jax.jit
def causal(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    return segment_attention(q, k, v, Causal(lengths), implementation="native")


@settings(max_examples=40, deadline=None)
@given(anything())
def test_any_vectors(drawn: tuple[Tokens, Tokens, Array, Array]) -> None:
    queries, keys, sees, window = drawn
    arrays = values(queries)
    got = attend(Arguments(*arrays, queries, np.asarray(sees, np.int32), keys=keys, window=window))
    np.testing.assert_allclose(got, loop(*arrays, rule(*drawn)), atol=3e-6)


@settings(max_examples=15, deadline=None)
@given(anything())
def test_attention_mass_of_any_tokens(drawn: tuple[Tokens, Tokens, Array, Array]) -> None:
    queries, _, sees, _ = drawn
    q, k, _ = values(queries)
    given = q, k, queries, jnp.asarray(sees, jnp.int32)
    got, want = (attention_mass(*given, implementation=form) for form in ("native", "reference"))
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_attention_mass_does_not_depend_on_threads(kernels: str) -> None:
    """Whichever thread computes a block, what keys get is added in one order."""
    arrays, program = both(OF_MASS.name, "long")
    first = np.asarray(program(arrays)[0])
    for _ in range(5):
        np.testing.assert_array_equal(program(arrays)[0], first)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (5, 1, 40), (4, 4, 8)])
def test_long_prompts_over_many_blocks(kernels: str, heads: int, kv_heads: int, dim: int) -> None:
    """Heads of a group share blocks of queries, which need not end with a block."""
    rng, lengths = np.random.default_rng(1), np.array([389, 200], np.int32)
    shapes = ((2, 389, heads, dim), *[(2, kv_heads, 389, dim)] * 2)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    got = causal(q, k, v, lengths)
    place = np.arange(389)
    mask = (
        (place[:, None] >= place)
        & (place < lengths[:, None, None])
        & (place[:, None] < lengths[:, None, None])
    )
    np.testing.assert_allclose(got, loop(q, k, v, mask), atol=3e-6)


def test_what_stands_in_padding_has_no_effect(kernels: str) -> None:
    rng, lengths = np.random.default_rng(2), np.array([130, 3], np.int32)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((2, 200, 2, 8), *[(2, 1, 200, 8)] * 2))
    want = np.asarray(causal(q, k, v, lengths))
    for row, length in enumerate(lengths):
        q[row, length:] = k[row, :, length:] = v[row, :, length:] = np.nan
    got = np.asarray(causal(q, k, v, lengths))
    np.testing.assert_array_equal(got, want)
    assert not got[0, 130:].any() and not got[1, 3:].any()


MANY = dict(
    tokens=230,
    lengths=(230, 97, 0, 96),
    widths=(45, 3, 45, 0),
    width=45,
    slots=18,
    heads=6,
    kv_heads=2,
    dim=21,
)
"""Three blocks of keys, of which the last is not full; more slots than are looked at together; a size of heads that no
vector divides; a search that has ended, and one without a prompt."""
BEAMS = {case.name: case for case in (*OF_BEAMS.tagged("ci"), Case("many", MANY))}


@functools.partial(jax.jit, compiler_options=CHEAP)
def attend_beams(arrays: dict[str, Any]) -> jax.Array:
    return beams_form.beam_attention(OfBeams(**arrays))


@functools.cache
def of_beams(name: str) -> tuple[dict[str, Any], Array]:
    arrays = OF_BEAMS.draw(BEAMS[name], jnp.float32)
    return arrays, beams_by_loop(arrays)


@pytest.mark.parametrize("name", BEAMS)
def test_attention_of_beams_equals_the_loop(kernels: str, name: str) -> None:
    arrays, want = of_beams(name)
    np.testing.assert_allclose(attend_beams(arrays), want, atol=3e-6)


def test_padding_and_dead_beams_have_no_effect_on_others(kernels: str) -> None:
    """Nor are ancestors that do not exist read from elsewhere; here those of dead beams."""
    arrays = {name: np.array(x) for name, x in of_beams("many")[0].items()}
    for b, width in enumerate(arrays["widths"]):
        arrays["ancestors"][b] %= max(width, 1)
    want = np.asarray(attend_beams(arrays))
    for b, (length, width) in enumerate(zip(arrays["lengths"], arrays["widths"], strict=True)):
        arrays["context_k"][b, :, length:] = arrays["context_v"][b, :, length:] = np.nan
        arrays["q"][b, width:] = np.nan
        arrays["beam_k"][b, :, width:] = arrays["beam_v"][b, :, width:] = np.nan
        arrays["ancestors"][b, :, width:] = [[-1], [2**31 - 1]] * 9
    got = np.asarray(attend_beams(arrays))
    np.testing.assert_array_equal(got, want)
    assert not got[1, 3:].any() and not got[3].any()


def test_numbers_out_of_range_read_what_is_there(kernels: str) -> None:
    """As the nearest number that exists."""
    arrays = {name: np.array(x) for name, x in of_beams("many")[0].items()}
    nearest = dict(lengths=[230, 0, 230, 0], widths=[45, 0, 45, 0])
    arrays |= {name: np.array(x, np.int32) for name, x in nearest.items()}
    arrays["ancestors"][0, 0, :2] = 0, 44
    want = np.asarray(attend_beams(arrays))
    far = dict(lengths=[231, -1, 2**31 - 1, -(2**31)], widths=[2**31 - 1, -1, 46, -(2**31)])
    arrays |= {name: np.array(x, np.int32) for name, x in far.items()}
    arrays["ancestors"][0, 0, :2] = -(2**31), 45
    np.testing.assert_array_equal(attend_beams(arrays), want)


def test_attention_of_beams_says_what_does_not_fit() -> None:
    good = {name: np.asarray(x) for name, x in of_beams("widths")[0].items()}
    wrong = {
        "beam_v": r"own_v is \[2, 2, 9, 2, 47\], and must be \[2, 2, 9, 2, 48\]",
        "context_v": r"v is \[2, 2, 70, 47\], and must be \[2, 2, 70, 48\]",
        "lengths": r"lengths is \[1\], and must be \[2\]",
        "ancestors": r"ancestors is \[2, 2, 8\], and must be \[2, 2, 9\]",
    }
    for name, message in wrong.items():
        short = good[name][:1] if name == "lengths" else good[name][..., :-1]
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(beams_form.beam_attention(OfBeams(**{**good, name: short})))


def test_auto_takes_the_attention_of_beams_where_they_are_many() -> None:
    def calls(width: int, dtype: Any = jnp.float32) -> bool:
        shape = dict(tokens=5, lengths=(5,), width=width, slots=1, heads=2, kv_heads=1, dim=8)
        text = jax.jit(beam_attention).lower(**OF_BEAMS.draw(Case("", shape), dtype)).as_text()
        return "jgr_native_beam_attention" in text

    assert calls(16) and not calls(15) and not calls(16, jnp.bfloat16)


FAMILIES = {
    "qwen2": dict(kv_heads=2, head_dim=16, hidden=48),
    "qwen3": dict(kv_heads=4, head_dim=32, hidden=64),
    "llama": dict(kv_heads=1, head_dim=10, hidden=72),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_decoders_equal_those_by_xla(family: Any) -> None:
    """Hidden states, keys and values; of a middle layer too, and where only some places are read."""
    sizes: dict[str, Any] = dict(vocab_size=300, layers=3, heads=4, mlp=100, rope_theta=1e4, norm_eps=1e-6)
    cfg = decoder.DecoderConfig(family=family, tied=True, max_position=512, **sizes, **FAMILIES[family])
    weights = params.initialize(decoder.spec(cfg), jax.random.key(0))
    weights = noisy(weights, 0.05)
    tokens = jax.random.randint(jax.random.key(2), (3, 130), 0, 300)
    lengths = jnp.array([130, 77, 1])
    real = np.arange(130) < np.asarray(lengths)[:, None]

    def prompts(**given: Any) -> list[Array]:
        program = jax.jit(
            lambda *arrays: decoder.prefill(*arrays, **given), static_argnums=1, compiler_options=CHEAP
        )
        out = program(weights, cfg, tokens, lengths)
        kept = np.where(real[None, :, None, :, None], np.asarray(out.context), 0)
        hidden = np.asarray(out.hidden)
        return [np.where(real[..., None], hidden, 0) if hidden.shape[1] == 130 else hidden, kept]

    whole = prompts(attention="xla")
    of_read = [whole[0][np.arange(3), np.asarray(lengths) - 1][:, None], whole[1]]
    middle: dict[str, Any] = {"layers": slice(1, 2)}
    for found, wanted in (
        (prompts(), whole),
        (prompts(read=lengths[:, None] - 1), of_read),
        (prompts(**middle), prompts(attention="xla", **middle)),
    ):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_of_decoders_equal_those_by_xla(family: Any) -> None:
    """Hidden states, keys and values of a second token, for 66 beams of two requests."""
    sizes: dict[str, Any] = dict(vocab_size=300, layers=2, heads=4, mlp=100, rope_theta=1e4, norm_eps=1e-6)
    cfg = decoder.DecoderConfig(family=family, tied=True, max_position=512, **sizes, **FAMILIES[family])
    weights = noisy(params.initialize(decoder.spec(cfg), jax.random.key(0)), 0.05)
    rng = np.random.default_rng(3)
    context = [rng.standard_normal((2, 2, cfg.kv_heads, 40, cfg.head_dim), np.float32) for _ in range(2)]
    earlier = [(rng.standard_normal((2, 2, 33, cfg.kv_heads, cfg.head_dim), np.float32),) for _ in range(2)]
    tokens, ancestors = rng.integers(0, 300, (2, 33)), rng.integers(0, 33, (2, 2, 33))
    ancestors[:, 1] = np.arange(33)

    def beams() -> Any:
        given = decoder.ContextKV(*context), jnp.array([40, 7]), BeamKV(*earlier), jnp.asarray(ancestors)
        program = jax.jit(
            lambda weights: decoder.decode(weights, cfg, jnp.asarray(tokens), *given), compiler_options=CHEAP
        ).lower(weights)
        calls = [name in program.as_text() for name in ("native_inputs", "native_output", "native_beam")]
        hidden, own = program.compile()(weights)
        return calls, hidden, own.k[1], own.v[1]

    calls, *found = beams()
    assert calls == [True] * 3
    native.use(False)
    try:
        calls, *expected = beams()
    finally:
        native.use(True)
    assert calls == [False] * 3
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_auto_takes_the_kernels_unless_they_are_switched_off() -> None:
    q, kv = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 2, 4, 8))

    def calls(x: jax.Array = q) -> bool:
        given = x, kv.astype(x.dtype), kv.astype(x.dtype), Causal(jnp.array([4]))
        return "jgr_native_attention" in jax.jit(lambda *a: segment_attention(*a)).lower(*given).as_text()

    assert calls() and not calls(q.astype(jnp.bfloat16))
    assert native.describe() == f"native-{native.library().kernels}"
    native.use(False)
    try:
        assert not calls() and native.describe() == "xla"
    finally:
        native.use(True)


def test_many_threads_at_once() -> None:
    """Loops on XLA's pool wait for nothing that has not begun, so calls from many threads cannot block each other."""
    case = OF_OUTPUT.tagged("ci")[2]
    (want,) = run(OF_OUTPUT, case, "native")
    given, options = OF_OUTPUT.draw(case, jnp.float32), OF_OUTPUT.options(case)
    program = jax.jit(lambda given: OF_OUTPUT.call(**given, **options, implementation="native"))
    with ThreadPoolExecutor(8) as threads:
        for got in threads.map(lambda _: np.asarray(program(given)), range(64)):
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_shapes_that_do_not_fit_are_errors() -> None:
    q, kv, six, four = (np.zeros(s, np.float32) for s in ((1, 4, 2, 8), (1, 2, 4, 8), (6, 1, 4), (4, 1, 4)))
    good = q, kv, kv, six.astype(np.int32), four.astype(np.int32)
    wrong: list[tuple[int, Any, str]] = [
        (1, np.zeros((1, 3, 4, 8), np.float32), "heads must be a multiple of kv_heads"),
        (1, np.zeros((1, 1, 4, 8), np.float32), r"v is \[1, 2, 4, 8\], and must be \[1, 1, 4, 8\]"),
        (2, np.zeros((1, 2, 5, 8), np.float32), r"v is \[1, 2, 5, 8\], and must be \[1, 2, 4, 8\]"),
        (3, np.zeros((5, 1, 4), np.int32), r"queries is \[5, 1, 4\], and must be \[6, 1, 4\]"),
        (4, np.zeros((4, 1, 9), np.int32), r"keys is \[4, 1, 9\], and must be \[4, 1, 4\]"),
        (4, np.zeros((4, 1, 4), np.float32), "S32|dtype"),
        (0, np.zeros((4, 2, 8), np.float32), "four dimensions"),
    ]
    assert native.call("attention", [q.shape, (0,)], *good)[0].shape == q.shape
    for at, array, message in wrong:
        given_arrays = [*good[:at], array, *good[at + 1 :]]
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(native.call("attention", [q.shape, (0,)], *given_arrays))

    five = np.zeros((1, 2, 5, 8), np.float32), good[3], np.zeros((4, 1, 5), np.int32)
    for others, tokens, message in (
        (five, 4, "the keys must be the queries' own"),
        ((kv, *good[3:]), 5, r"out is \[1, 5\], and must be \[1, 4\]"),
    ):
        made = jax.ShapeDtypeStruct((1, tokens), jnp.float32)
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(native.call("attention_mass", [made], q, *others))


@pytest.mark.parametrize("number", [-1, 3, 2**31 - 1])
def test_a_layer_that_is_not_there_is_an_error(number: int) -> None:
    case = OF_OUTPUT.tagged("ci")[0]
    given_arrays = OF_OUTPUT.draw(case, jnp.float32)
    h, attended = given_arrays.pop("h"), given_arrays.pop("attended")
    weights = decoder_layer.OutputWeights(**given_arrays)
    with pytest.raises(Exception, match="number must be that of a layer"):
        call = decoder_layer.layer_output(
            h, attended, weights, jnp.int32(number), eps=1e-6, implementation="native"
        )
        jax.block_until_ready(call)


def test_a_library_of_another_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = types.ModuleType("jgr_native")
    other.INTERFACE = native.INTERFACE + 1  # type: ignore[attr-defined]
    other.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    with installed():
        monkeypatch.setitem(sys.modules, "jgr_native", other)
        native.library.cache_clear()
        assert native.describe() == "xla"
        assert "jgr-native has interface" in caplog.text
        with pytest.raises(ValueError, match="'native' cannot run: jgr-native cannot be used"):
            run(OP, OP.tagged("ci")[0], "native")
        np.testing.assert_array_equal(*(run(OP, OP.tagged("ci")[0], form)[0] for form in ("auto", "xla")))
    native.library.cache_clear()
