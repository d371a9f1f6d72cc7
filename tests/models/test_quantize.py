# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 bits against numpy: rounding, products, folders that are rounded, folders that are quantised already."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jgr.config import ConfigError
from jgr.models import (
    checkpoint,
    decoder,
    decoder_costs,
    generator_costs,
    hf,
    lazy_decoder,
    lazy_decoder_costs,
)
from jgr.models import quantize as quantizing
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.params import CheckpointError, by_name, initialize
from jgr.models.quantize import Quantization, kind_of, rounded
from jgr.ops.dense import dense
from jgr.ops.quantized import Quantized

HF = Path(__file__).parents[1] / "golden" / "hf"
KINDS: tuple[Quantization, ...] = ("int8", "fp8")
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")
SMALL = DecoderConfig("qwen3", 64, 96, 8, 4, 2, 24, 384, 1e4, 1e-6, tied=True, max_position=64)
Array = np.ndarray[Any, Any]


def e4m3(bits: Array) -> Array:
    """The numbers that the bits of fp8 stand for, by its definition: a sign, 4 bits of exponent, 3 of mantissa."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    )
    return np.where(bits >> 7, -size, size)


def as_numbers(w: Quantized) -> Array:
    values = np.asarray(w.values)
    whole = e4m3(values) if values.dtype == np.uint8 else values.astype(np.float64)
    return whole * np.asarray(w.scale, np.float64)[..., None, :]


def dequantized(params: Any) -> Any:
    """The same parameters with arrays of float32 in the place of matrices in 8 bits."""
    return jax.tree.map(
        lambda x: jnp.asarray(as_numbers(x), jnp.float32) if isinstance(x, Quantized) else x,
        params,
        is_leaf=lambda x: isinstance(x, Quantized),
    )


def matrix(seed: int = 0, shape: tuple[int, ...] = (37, 19)) -> Array:
    """Columns of very different sizes, one of them zero."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(0, 10.0 ** rng.integers(-6, 4, shape[-1]), shape)
    drawn[..., 3] = 0
    return drawn.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_becomes_the_nearest_that_its_column_has(kind: Quantization) -> None:
    w = matrix()
    found = rounded(w, kind)
    numbers = (
        np.arange(-127, 128) if kind == "int8" else e4m3(np.array([b for b in range(256) if b & 127 != 127]))
    )
    largest = np.abs(numbers).max()
    want = np.abs(w).max(0).astype(np.float64) / largest
    want[3] = 1
    np.testing.assert_allclose(found.scale, want, rtol=1e-6)
    assert found.scale.dtype == np.float32 and found.values.shape == w.shape and found.values.itemsize == 1
    candidates = numbers[:, None] * np.asarray(found.scale, np.float64)[None]  # [n, F]
    nearest = np.abs(candidates[:, None] - w[None]).min(0)
    error = np.abs(as_numbers(found) - w)
    assert (error <= nearest * (1 + 1e-5) + 1e-12 * np.abs(w)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_the_dequantised_matrix(kind: Quantization, dtype: Any) -> None:
    w = rounded(matrix(), kind)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 37)), dtype)
    found = jax.jit(dense)(x, Quantized(jnp.asarray(w.values), jnp.asarray(w.scale)))
    want = np.asarray(x, np.float64) @ as_numbers(w)
    assert found.dtype == dtype and found.shape == (2, 5, 19)
    error = np.abs(np.asarray(found, np.float64) - want) / np.asarray(
        w.scale, np.float64
    )  # columns of one size
    assert error.max() < (2**-8 if dtype == jnp.bfloat16 else 1e-6) * np.abs(want / w.scale).max()


@functools.partial(jax.jit, static_argnames="cfg")
def both(params: Any, *, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """The logits after two prompts, and of two beams after each."""
    tokens, lengths = np.random.default_rng(0).integers(0, 60, (2, 9), np.int32), np.array([9, 6], np.int32)
    last, state = decoder.begin(params, cfg, tokens, lengths)
    hidden, _ = decoder.advance(
        params, cfg, tokens[:, :2], state, jnp.zeros((2, 1, 2), jnp.int32) + jnp.arange(2)
    )
    return decoder.logits(params, last), decoder.logits(params, hidden)


def logits(params: Any, cfg: DecoderConfig) -> Array:
    return np.concatenate([np.asarray(x).ravel() for x in both(params, cfg=cfg)])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_rounded_as_numpy_rounds_its_arrays(
    family: str, kind: Quantization, tmp_path: Path
) -> None:
    cfg, whole = hf.load(HF / family, jnp.float32)
    _, found = hf.load(HF / family, jnp.float32, kind=kind)
    assert (kind_of(whole), kind_of(found)) == ("", kind)
    for name in MATRICES:
        given, made = (jax.tree.map(np.asarray, getattr(of.layers, name)) for of in (whole, found))
        for layer in range(cfg.layers):
            want = rounded(given[layer], kind)
            np.testing.assert_array_equal(made.values[layer], want.values)
            np.testing.assert_array_equal(made.scale[layer], want.scale)
    rest = {name for name in by_name(whole) if name.rpartition(".")[2] not in MATRICES}
    for name in rest:
        np.testing.assert_array_equal(by_name(found)[name], by_name(whole)[name])
    if family == "qwen3":
        scores = logits(found, cfg)
        np.testing.assert_allclose(scores, logits(dequantized(found), cfg), atol=1e-4)
        assert np.abs(scores - logits(whole, cfg)).max() > 1e-2
        # The other kind of folder holds the same.
        checkpoint.save(tmp_path / "own", cfg, whole)
        again = checkpoint.load(tmp_path / "own", jnp.float32, kind=kind)[1]
        jax.tree.map(np.testing.assert_array_equal, found, again)


def test_onerec_is_rounded_unless_it_has_experts(tmp_path: Path) -> None:
    plain = LazyConfig(20, (3, 9), (6, 6), 4, 16, 1, 2, 2, 8, 24)
    checkpoint.save(tmp_path / "plain", plain, initialize(lazy_decoder.spec(plain), jax.random.key(0)))
    mixed = dataclasses.replace(plain, layers=2, experts=2, experts_active=1, expert_mlp=8, dense_layers=1)
    (tmp_path / "mixed" / "params").mkdir(parents=True)
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(lazy_decoder.to_config(mixed)))
    with pytest.raises(ConfigError, match=r"model\.quantize: int8, but .* is a model with experts"):
        checkpoint.load(tmp_path / "mixed", kind="int8")
    _, found = checkpoint.load(tmp_path / "plain", kind="int8")
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Quantized))
    assert (
        sum(isinstance(x, Quantized) for x in leaves) == 10
    )  # the tensor of the history, and nine of the blocks
    tokens, lengths = np.array([[3, 9, 4, 10]], np.int32), np.array([4], np.int32)
    run = jax.jit(lambda p: lazy_decoder.begin(p, plain, tokens, lengths)[0])
    np.testing.assert_allclose(run(found), run(dequantized(found)), atol=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_weights_that_are_no_numbers_are_refused_by_name(own: bool, tmp_path: Path) -> None:
    cfg, whole = hf.load(HF / "qwen3")
    bad = np.array(whole.layers.gate)
    bad[1, 5, 7] = np.nan
    damaged = dataclasses.replace(whole, layers=dataclasses.replace(whole.layers, gate=jnp.asarray(bad)))
    checkpoint.save(tmp_path / "m", cfg, damaged) if own else hf.export(tmp_path / "m", cfg, damaged)
    name = "layers.gate" if own else "model.layers.1.mlp.gate_proj.weight"
    with pytest.raises(
        CheckpointError, match=rf"damaged checkpoint: {name}: it holds what is no finite number"
    ):
        checkpoint.load(tmp_path / "m", kind="int8")


def test_a_load_holds_one_matrix_at_a_time_as_floats(tmp_path: Path) -> None:
    drawn = initialize(decoder.spec(SMALL), jax.random.key(0))
    hf.export(tmp_path / "m", SMALL, drawn)
    one = 4 * SMALL.hidden * SMALL.mlp
    hf.load(tmp_path / "m", jnp.float32, kind="int8")
    tracemalloc.start()
    try:
        params = hf.load(tmp_path / "m", jnp.float32, kind="int8")[1]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # On a CPU the served arrays may be the host's. Floats of a whole stack would be 8 matrices.
    assert peak < sum(x.nbytes for x in jax.tree.leaves(params)) + 4 * one


@functools.cache
def compiled(kind: Quantization) -> Any:
    """What a prompt and two steps after it take in memory."""

    def call(params: DecoderParams, tokens: jax.Array) -> jax.Array:
        last, state = decoder.begin(params, SMALL, tokens, jnp.full(1, 16))
        for step in range(2):
            ancestors = jnp.zeros((1, step + 1, 4), jnp.int32)
            last, state = decoder.advance(params, SMALL, tokens[:, :4], state, ancestors)
        return decoder.logits(params, last)

    given = quantizing.declared(decoder.spec(SMALL), kind), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    return jax.jit(call).lower(*given).compile().memory_analysis()


@pytest.mark.parametrize("kind", KINDS)
def test_programs_make_no_float_copies_of_more_than_a_layer(kind: Quantization) -> None:
    whole, found, layers = compiled(""), compiled(kind), decoder.spec(SMALL).layers
    layer = 4 * sum(np.prod(getattr(layers, name).shape[1:]) for name in MATRICES)
    assert found.argument_size_in_bytes < 0.35 * whole.argument_size_in_bytes
    assert found.temp_size_in_bytes <= whole.temp_size_in_bytes + layer


def test_costs_count_the_bytes_of_small_weights() -> None:
    for costs, cfg in (
        (decoder_costs.cost, SMALL),
        (lazy_decoder_costs.cost, LazyConfig(20, (3, 9), (6, 6), 4, 16, 2, 2, 2, 8, 24)),
    ):
        for work in (generator_costs.prefill(2, 8), generator_costs.Decode(2, 4, 8, 1)):
            by_four, by_two, small = (costs(cfg, work, *sizes) for sizes in ((4,), (2,), (4, 1)))  # type: ignore[operator]
            numbers = by_two.bytes // 2
            assert small._replace(bytes=0) == by_four._replace(bytes=0)
            weights = (by_four.bytes - small.bytes) // 3
            assert 0 < weights < numbers and small.bytes == weights + 4 * (numbers - weights)
    matrices = SMALL.layers * (SMALL.hidden * (4 + 2 + 2 + 4) * 24 + 3 * SMALL.hidden * SMALL.mlp)
    decode = generator_costs.Decode(1, 1, 1, 0)
    assert (
        decoder_costs.cost(SMALL, decode, 4).bytes - decoder_costs.cost(SMALL, decode, 4, 1).bytes
        == 3 * matrices
    )


def quantization(kind: str = "int8", **changes: Any) -> dict[str, Any]:
    """What llm-compressor writes of a model with a factor for each channel, with changes of the weights' fields."""
    number, form = ("int", "int-quantized") if kind == "int8" else ("float", "float-quantized")
    weights = {
        "num_bits": 8, "type": number, "symmetric": True, "strategy": "channel", "dynamic": False, "group_size": None,
        "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {}, **changes,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {},
    }  # fmt: skip


def compress(folder: Path, kind: str, family: str = "llama3") -> dict[str, Array]:
    """Write a quantised folder of a golden model, and give the arrays that its matrices stand for, by name."""
    folder.mkdir()
    raw = json.loads((HF / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization(kind)}))
    tensors, meant = {}, {}
    rng = np.random.default_rng(0)
    for name, tensor in load_file(HF / family / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = (np.abs(tensor).max(1, keepdims=True) * rng.uniform(0.9, 1.1) / 100).astype(
            ml_dtypes.bfloat16
        )
        ratio = tensor / scale.astype(np.float32)
        if kind == "int8":
            tensors[name] = np.clip(np.round(ratio), -128, 127).astype(np.int8)
            numbers = tensors[name].astype(np.float64)
        else:
            tensors[name] = ratio.astype(ml_dtypes.float8_e4m3fn)
            numbers = e4m3(tensors[name].view(np.uint8))
        tensors[f"{name}_scale"] = scale
        meant[name] = numbers * scale.astype(np.float64)
    save_file(tensors, folder / "model.safetensors")
    return meant


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_served_as_it_is(kind: Quantization, tmp_path: Path) -> None:
    meant = compress(tmp_path / "m", kind)
    cfg, found = checkpoint.load(tmp_path / "m", kind="")
    assert isinstance(found, DecoderParams) and kind_of(found) == kind
    keys = {
        "wq": "self_attn.q_proj",
        "wo": "self_attn.o_proj",
        "down": "mlp.down_proj",
        "gate": "mlp.gate_proj",
    }
    for ours, theirs in keys.items():
        for layer in range(cfg.layers):
            want = meant[f"model.layers.{layer}.{theirs}.weight"].T
            np.testing.assert_allclose(as_numbers(getattr(found.layers, ours))[layer], want, rtol=1e-6)
    assert checkpoint.load(tmp_path / "m", kind=kind)[0] == cfg == hf.load(HF / "llama3")[0]
    other: Quantization = "fp8" if kind == "int8" else "int8"
    with pytest.raises(
        ConfigError, match=rf"model\.quantize: {other}, but the weights of .* are {kind} already"
    ):
        checkpoint.load(tmp_path / "m", kind=other)
    with pytest.raises(CheckpointError, match=rf"its weights are quantised \({kind}\)"):
        checkpoint.load(tmp_path / "m")  # to train or convert


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        change(raw["quantization_config"])
        (folder / "config.json").write_text(json.dumps(raw))

    return apply


def weights(**fields: Any) -> Callable[[Path], None]:
    return edit(lambda q: q["config_groups"]["group_0"]["weights"].update(fields))


def group(**fields: Any) -> Callable[[Path], None]:
    return edit(lambda q: q["config_groups"]["group_0"].update(fields))


def add_tensor(name: str, tensor: Array) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file({**load_file(folder / "model.safetensors"), name: tensor}, folder / "model.safetensors")

    return apply


FIRST = "model.layers.0.mlp.up_proj.weight"
REFUSED = {
    "gptq": (edit(lambda q: q.update(quant_method="gptq")), "quant_method='gptq' is not supported"),
    "packed": (edit(lambda q: q.update(format="pack-quantized")), "format='pack-quantized' is not supported"),
    "four bits": (weights(num_bits=4), "weights.num_bits=4 is not supported"),
    "groups": (weights(strategy="group", group_size=128), "weights.strategy='group' is not supported"),
    "zero points": (weights(symmetric=False), "weights.symmetric=False is not supported"),
    "other numbers": (weights(type="float"), "weights.type='float' is not supported"),
    "a layer": (group(targets=["re:.*down_proj"]), r"targets=\['re:.*down_proj'\] is not supported"),
    "fixed activations": (group(input_activations={"dynamic": False}), "input_activations=.* is not supported"),
    "two groups": (edit(lambda q: q["config_groups"].update(more={})), "config_groups=.* is not supported"),
    "left out": (edit(lambda q: q.update(ignore=["model.layers.0"])), "ignore=.* is not supported"),
    "a transform": (edit(lambda q: q.update(transform_config={"R4": {}})), "transform_config=.* is not supported"),
    "a group's format": (
        edit(lambda q: q["config_groups"]["group_0"].update(format="pack-quantized")), "format of the group",
    ),
    "a cache": (edit(lambda q: q.update(kv_cache_scheme={"num_bits": 8})), "kv_cache_scheme=.* is not supported"),
    "no object": (edit(lambda q: q.clear()), "quant_method=None is not supported"),
    "a zero point": (add_tensor(f"{FIRST}_zero_point", np.zeros((2, 1), np.int8)), f"unexpected {FIRST}_zero_point"),
    "floats": (add_tensor(FIRST, np.zeros((192, 96), np.float32)), f"{FIRST} is of dtype F32"),
    "factors": (add_tensor(f"{FIRST}_scale", np.ones((3, 1), np.float32)), rf"{FIRST}_scale has shape \(3, 1\)"),
    "factors of 0": (
        add_tensor(f"{FIRST}_scale", np.zeros((176, 1), np.float32)), "up_proj.weight_scale holds what is not above 0",
    ),
    "no number": (
        add_tensor(f"{FIRST}_scale", np.full((176, 1), np.nan, np.float32)), "up.scale holds what is no finite number",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "m"
    compress(folder, "int8")
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, compressed: Path, tmp_path: Path) -> None:
    spoil, words = REFUSED[case]
    shutil.copytree(compressed, tmp_path / "m")
    spoil(tmp_path / "m")
    with pytest.raises(CheckpointError, match=words) as refused:
        checkpoint.load(tmp_path / "m", kind="")
    assert "\n" not in str(refused.value)


def test_a_nan_in_fp8_is_refused(tmp_path: Path) -> None:
    compress(tmp_path / "m", "fp8")
    path = tmp_path / "m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + size])[FIRST]["data_offsets"]
    data[8 + size + begin + 5] = 0x7F
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"damaged checkpoint: {FIRST} holds what is no finite number"):
        checkpoint.load(tmp_path / "m", kind="")
