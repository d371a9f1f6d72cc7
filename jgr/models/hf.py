# SPDX-License-Identifier: Apache-2.0
"""Dense decoders in and out of Hugging Face folders (MODEL-3): config.json + safetensors, single file or sharded.

Both spellings of the rope fields are read: `rope_parameters` (current) and `rope_theta` + `rope_scaling` (older).
Anything that would change the function and that jgr does not compute is refused by name, never ignored. Weights are
stored [in, out] here and [out, in] there; a round trip is bit-exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jgr import stopping
from jgr.config import ConfigError
from jgr.fields import one_line
from jgr.models import compressed, quantize
from jgr.models.compressed import STORED, SUFFIX, read_fp8
from jgr.models.config_file import LARGEST, LARGEST_DEPTH, read_object
from jgr.models.decoder import DecoderConfig, DecoderParams, Family, LayerParams, spec
from jgr.models.devices import ONE, Devices, of_generator
from jgr.models.model_files import weight_files
from jgr.models.params import CheckpointError, Spec, by_name, check_finite, count
from jgr.models.quantize import Quantization, is_matrix
from jgr.models.room import require_memory
from jgr.models.rope import RopeScaling
from jgr.ops.quantized import Quantized

Array = npt.NDArray[Any]
LARGEST_NUMBER = 1e15
LARGEST_ITEM = 8
"""Bytes of the widest number that a checkpoint stores."""
LARGEST_HEADER = 100_000_000
"""The most bytes of a header that the library of safetensors reads, with what stands around it."""
Config = TypeVar("Config")

_FAMILIES: dict[str, Family] = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Values under which a field does not change the function; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, 1, None),
}
# attention_bias follows from the family: Qwen2 has biases on q, k, v and no such field; the others must have it false.

_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})

# our LayerParams field -> (name under model.layers.{i}., stored transposed)
_LAYER_KEYS: dict[str, tuple[str, bool]] = {
    "attention_norm": ("input_layernorm.weight", False),
    "wq": ("self_attn.q_proj.weight", True),
    "wk": ("self_attn.k_proj.weight", True),
    "wv": ("self_attn.v_proj.weight", True),
    "wo": ("self_attn.o_proj.weight", True),
    "mlp_norm": ("post_attention_layernorm.weight", False),
    "gate": ("mlp.gate_proj.weight", True),
    "up": ("mlp.up_proj.weight", True),
    "down": ("mlp.down_proj.weight", True),
    "bq": ("self_attn.q_proj.bias", False),
    "bk": ("self_attn.k_proj.bias", False),
    "bv": ("self_attn.v_proj.bias", False),
    "q_norm": ("self_attn.q_norm.weight", False),
    "k_norm": ("self_attn.k_norm.weight", False),
}


def read_config(path: Path) -> DecoderConfig:
    """Read a Hugging Face config.json. Raises CheckpointError naming the field that is missing or not supported."""
    return parse_file(path, parse_config)


def parse_file(path: Path, parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Parse a config.json by `parse`, and add the file's name to the CheckpointErrors that it raises."""
    raw = read_object(path)
    try:
        return parse(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def _parse_quantized(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Quantization]:
    """The architecture, and how the checkpoint's matrices are quantised."""
    rest = {name: value for name, value in raw.items() if name != "quantization_config"}
    return parse_config(rest), compressed.parse(raw.get("quantization_config"))


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The architecture that a Hugging Face config states."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; there are {sorted(_FAMILIES)}")
    for name, neutral in _NEUTRAL.items():
        if name in raw and raw[name] not in neutral:
            raise CheckpointError(f"{name}={raw[name]!r} is not supported (supported: {neutral[0]!r})")
    if raw.get("attention_bias") and model_type != "qwen2":
        raise CheckpointError(f"attention_bias=true is not supported for {model_type}")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"layer_types {kinds!r} is not supported (supported: full_attention)")
    tied = raw.get("tie_word_embeddings") or False
    if tied not in (True, False):
        raise CheckpointError(f"tie_word_embeddings must be true or false, found {tied!r}")
    theta, scaling = _rope(raw)
    heads, hidden = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
    kv_heads = _integer(raw, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return DecoderConfig(
        family=_FAMILIES[model_type],
        vocab_size=_integer(raw, "vocab_size"),
        hidden=hidden,
        layers=_integer(raw, "num_hidden_layers", largest=LARGEST_DEPTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_integer(raw, "head_dim", default=hidden // heads),
        mlp=_integer(raw, "intermediate_size"),
        rope_theta=theta,
        norm_eps=_number(raw, "rms_norm_eps"),
        tied=tied,
        max_position=_integer(raw, "max_position_embeddings"),
        rope_scaling=scaling,
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = raw.get("rope_parameters") or {}
    scaling = rope or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError("rope_parameters / rope_scaling must be an object")
    theta = _number(rope if "rope_theta" in rope else raw, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"rope_type {kind!r} is not supported; there are 'default' and 'llama3'")
    return theta, RopeScaling(
        factor=_number(scaling, "factor"),
        low_freq_factor=_number(scaling, "low_freq_factor"),
        high_freq_factor=_number(scaling, "high_freq_factor"),
        original_max_position=_integer(scaling, "original_max_position_embeddings"),
    )


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None, largest: int = LARGEST) -> int:
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= largest:
        raise CheckpointError(f"{name} must be a positive integer, found {value!r}; {largest} is the most")
    return value


def _number(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
        raise CheckpointError(f"{name} must be a positive number, found {value!r}")
    return float(value)


def to_config(cfg: DecoderConfig) -> dict[str, Any]:
    """The Hugging Face config of an architecture, in the current spelling."""
    rope: dict[str, Any] = {"rope_theta": cfg.rope_theta, "rope_type": "default"}
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        rope.update(
            rope_type="llama3",
            factor=s.factor,
            low_freq_factor=s.low_freq_factor,
            high_freq_factor=s.high_freq_factor,
            original_max_position_embeddings=s.original_max_position,
        )
    return {
        "architectures": [_ARCHITECTURES[cfg.family]],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": cfg.tied,
        "max_position_embeddings": cfg.max_position,
    }


def load(
    folder: Path, dtype: Any = None, devices: Devices = ONE, kind: Quantization | None = None
) -> tuple[DecoderConfig, DecoderParams]:
    """Read config and weights of a Hugging Face folder; dtype None keeps the files' own. devices: where they go. kind:
    how matrices are held, see jgr.models.checkpoint.load.

    Raises CheckpointError naming each missing, unexpected or mis-shaped tensor.
    """
    cfg, stored = parse_file(folder / "config.json", _parse_quantized)
    if stored and kind is None:
        raise CheckpointError(
            f"{folder}: its weights are quantised ({stored}), which can be served and nothing else"
        )
    if stored and kind not in ("", stored):
        raise ConfigError(f"model.quantize: {kind}, but the weights of {folder} are {stored} already")
    kind = stored or kind or ""
    with ExitStack() as stack:
        read, names = _open(folder, stack, stored)
        _check_names(folder, cfg, names, lambda name: read(name, True), stored)
        declared = spec(cfg)
        served, placement = of_generator(cfg, devices)
        _require_memory(folder, declared, dtype, kind)

        def put(declared: Spec, name: str) -> Any:
            return placement.put(declared, read(name, False), dtype)

        def put_layers(declared: Spec, key: str, transposed: bool) -> Any:
            if kind and is_matrix(declared):
                return quantize.put(declared, _matrices(folder, cfg, read, key, stored, kind), placement)
            return placement.put(declared, _stack_layers(cfg, read, key, transposed), dtype)

        layers = {
            name: put_layers(getattr(declared.layers, name), key, transposed)
            for name, key, transposed in _layer_keys(declared)
        }
        params = DecoderParams(
            embed=put(declared.embed, "model.embed_tokens.weight"),
            layers=LayerParams(**layers),
            norm=put(declared.norm, "model.norm.weight"),
            head=None if cfg.tied else put(declared.head, "lm_head.weight"),
        )
        if cfg.tied and "lm_head.weight" in names:
            same = np.array_equal(read("lm_head.weight", False), read("model.embed_tokens.weight", False))
            if not same:
                raise CheckpointError(
                    f"{folder}: tie_word_embeddings is true, and lm_head.weight is another than the embedding"
                )
    check_finite(folder, params)
    return served, params


def most_bytes(folder: Path) -> int:
    """The most bytes that the weights of a Hugging Face folder can hold: each number in the widest type, a tied
    embedding twice, and the header of each file."""
    cfg, _ = parse_file(folder / "config.json", _parse_quantized)
    numbers = count(spec(cfg)) + (cfg.vocab_size * cfg.hidden if cfg.tied else 0)
    return LARGEST_ITEM * numbers + LARGEST_HEADER * len(weight_files(folder))


def _require_memory(folder: Path, declared: DecoderParams, dtype: Any, kind: Quantization) -> None:
    """Each kind of a layer's tensors is stacked and then cast, so its largest is there three times; of matrices in 8
    bits their stack is, and the floats of one."""
    specs = by_name(declared).values()
    at_once = (
        math.prod(s.shape) + 3 * 4 * math.prod(s.shape[1:])
        if kind and is_matrix(s)
        else 3 * 4 * math.prod(s.shape)
        for s in specs
    )
    read = max(at_once)
    stored = sum((folder / name).stat().st_size for name in weight_files(folder))
    try:
        if dtype is None:
            require_memory(stored, read)
        else:
            require_memory(quantize.served_bytes(specs, dtype, kind), read)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def export(folder: Path, cfg: DecoderConfig, params: DecoderParams) -> None:
    """Write config.json and model.safetensors; `load` of the folder gives the same bits."""
    tensors: dict[str, Array] = {
        "model.embed_tokens.weight": np.asarray(params.embed),
        "model.norm.weight": np.asarray(params.norm),
    }
    if params.head is not None:
        tensors["lm_head.weight"] = np.asarray(params.head)
    for name, key, transposed in _layer_keys(spec(cfg)):
        stacked = np.asarray(getattr(params.layers, name))
        for i, layer in enumerate(stacked):
            tensors[f"model.layers.{i}.{key}"] = np.ascontiguousarray(layer.T if transposed else layer)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**to_config(cfg), "dtype": str(tensors["model.norm.weight"].dtype)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _layer_keys(declared: DecoderParams) -> Iterator[tuple[str, str, bool]]:
    for f in fields(LayerParams):
        if getattr(declared.layers, f.name) is not None:
            yield f.name, *_LAYER_KEYS[f.name]


Reader = Callable[[str, bool], Any]  # (tensor name, shape only) -> array or shape


def _open(folder: Path, stack: ExitStack, stored: Quantization) -> tuple[Reader, set[str]]:
    """stored: how the matrices are quantised."""
    where: dict[str, str] = {}
    files: dict[str, Any] = {}
    for shard in weight_files(folder):
        path = folder / shard
        try:
            files[shard] = stack.enter_context(safe_open(path, framework="numpy"))
            names = files[shard].keys()
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: no weights: there is no {one_line(shard, 80)}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged safetensors: {one_line(error)}") from None
        twice = next((name for name in names if name in where), None)
        if twice is not None:
            raise CheckpointError(f"{path}: damaged safetensors: {twice} is in {where[twice]} too")
        where.update(dict.fromkeys(names, shard))

    def read(name: str, shape_only: bool) -> Any:
        stopping.check()
        try:
            if not shape_only and stored == "fp8" and f"{name}{SUFFIX}" in where:
                return read_fp8(folder / where[name], name)
            if not shape_only:
                return _native(files[where[name]].get_tensor(name))
            view = files[where[name]].get_slice(name)
            wanted = {STORED[stored]} if stored and f"{name}{SUFFIX}" in where else _DTYPES
            if view.get_dtype() not in wanted:
                raise CheckpointError(f"{folder}: {name} is of dtype {view.get_dtype()}")
            return tuple(view.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{folder}: {name}: {error}") from None

    return read, set(where)


def _native(array: Array) -> Array:
    """bfloat16 may arrive as its 16-bit pattern; give it its type back."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def _check_names(
    folder: Path,
    cfg: DecoderConfig,
    names: set[str],
    shape_of: Callable[[str], tuple[int, ...]],
    stored: Quantization = "",
) -> None:
    """stored: how the file's matrices are quantised."""
    wanted = {"model.embed_tokens.weight": (cfg.vocab_size, cfg.hidden), "model.norm.weight": (cfg.hidden,)}
    if not cfg.tied:
        wanted["lm_head.weight"] = (cfg.vocab_size, cfg.hidden)
    declared = spec(cfg)
    for name, key, transposed in _layer_keys(declared):
        layer_spec: Spec = getattr(declared.layers, name)
        shape = layer_spec.shape[:0:-1] if transposed else layer_spec.shape[1:]
        wanted.update({f"model.layers.{i}.{key}": shape for i in range(cfg.layers)})
        if stored and is_matrix(layer_spec):
            wanted.update({f"model.layers.{i}.{key}{SUFFIX}": (shape[0], 1) for i in range(cfg.layers)})
    if cfg.tied and "lm_head.weight" in names:  # some tied files repeat the embedding under this name
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    problems = [f"missing {name}" for name in sorted(wanted.keys() - names)]
    problems += [f"unexpected {name}" for name in sorted(names - wanted.keys())]
    for name in sorted(wanted.keys() & names):
        if shape_of(name) != wanted[name]:
            problems.append(f"{name} has shape {shape_of(name)}, the config asks for {wanted[name]}")
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise CheckpointError(f"{folder}: weights do not fit config.json: {one_line(shown, 900)}")


def _matrices(
    folder: Path, cfg: DecoderConfig, read: Reader, key: str, stored: Quantization, kind: Quantization
) -> Iterator[Quantized]:
    """The matrices of all layers in 8 bits, [in, out] each; of a file where they are not yet, each is rounded."""
    for i in range(cfg.layers):
        name = f"model.layers.{i}.{key}"
        if stored:
            with np.errstate(over="ignore"):  # infinities are refused with all that is not finite
                scale = np.asarray(read(f"{name}{SUFFIX}", False), np.float32)
            numbers = read(name, False)
            if (scale[numbers.any(axis=1), 0] <= 0).any():
                raise CheckpointError(
                    f"{folder}: damaged checkpoint: {name}{SUFFIX} holds what is not above 0"
                )
            yield Quantized(numbers.T, scale[:, 0])
        else:
            try:
                yield quantize.rounded(read(name, False).T, kind)
            except CheckpointError as error:
                raise CheckpointError(f"{folder}: damaged checkpoint: {name}: {error}") from None


def _stack_layers(cfg: DecoderConfig, read: Reader, key: str, transposed: bool) -> Array:
    layers = (read(f"model.layers.{i}.{key}", False) for i in range(cfg.layers))
    return np.stack([layer.T if transposed else layer for layer in layers])
