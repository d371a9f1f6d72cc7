# SPDX-License-Identifier: Apache-2.0
"""Model folders: bit-exact round trips, both config spellings, shards, and every refusal by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jgr.models import checkpoint, decoder, hf
from jgr.models.params import CheckpointError
from tools import gpu_target

DEAD = 2**31 - 1
"""A number that no process has."""
HF = Path(__file__).parents[1] / "golden" / "hf"


def copy(family: str, to: Path) -> Path:
    to.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(HF / family / name, to / name)
    return to


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        raw.pop(name, None) if value is ... else raw.__setitem__(name, value)
    path.write_text(json.dumps(raw))


def assert_same_bits(a: decoder.DecoderParams, b: decoder.DecoderParams) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_both_config_spellings_say_the_same(family: str, tmp_path: Path) -> None:
    new = hf.read_config(HF / family / "config.json")
    assert hf.read_config(HF / family / "config_legacy.json") == new
    assert hf.parse_config(hf.to_config(new)) == new


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_export_gives_the_file_back_bit_by_bit(family: str, tmp_path: Path) -> None:
    hf.export(tmp_path / "out", *hf.load(HF / family))
    want, got = (
        load_file(HF / family / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got[name], tensor)
    assert hf.read_config(tmp_path / "out" / "config.json") == hf.read_config(HF / family / "config.json")


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    cfg, params = hf.load(HF / "qwen3", jnp.bfloat16)
    hf.export(tmp_path / "out", cfg, params)
    assert_same_bits(hf.load(tmp_path / "out")[1], params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_of_16_bits_are_served_so_on_a_gpu_alone(tmp_path: Path) -> None:
    cfg, params = hf.load(HF / "qwen3")
    hf.export(tmp_path / "half", cfg, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    hf.export(tmp_path / "whole", cfg, params)
    checkpoint.save(tmp_path / "own", cfg, params)
    edit_config(legacy := copy("qwen3", tmp_path / "legacy"), dtype=..., torch_dtype="float16")
    folders = [tmp_path / "half", tmp_path / "whole", tmp_path / "own", legacy]
    assert [checkpoint.served_dtype(folder, "") for folder in folders] == ["float32"] * 4
    with jax.sharding.use_abstract_mesh(gpu_target.ABSTRACT):
        found = [checkpoint.served_dtype(folder, "") for folder in folders]
        assert checkpoint.served_dtype(tmp_path / "half", "float32") == "float32"
    assert found == ["bfloat16", "float32", "float32", "bfloat16"]
    assert checkpoint.served_dtype(tmp_path / "whole", "bfloat16") == "bfloat16"


def test_shards_equal_the_single_file() -> None:
    single, sharded = hf.load(HF / "llama3"), hf.load(HF / "llama3" / "sharded")
    assert single[0] == sharded[0]
    assert_same_bits(single[1], sharded[1])


def test_orbax_round_trip(tmp_path: Path) -> None:
    cfg, params = hf.load(HF / "qwen2")
    folder = tmp_path / "own"
    checkpoint.save(folder, *hf.load(HF / "qwen3"))
    checkpoint.save(
        folder, cfg, params, lambda f: (f / "tokenizer.json").write_text("{}")
    )  # over an older one
    assert (folder / "tokenizer.json").read_text() == "{}"
    again = checkpoint.load(folder)
    assert again[0] == cfg
    assert_same_bits(again[1], params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"]


def test_a_tied_file_may_repeat_the_head(tmp_path: Path) -> None:
    folder = copy("qwen2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, folder / "model.safetensors"
    )
    assert_same_bits(hf.load(folder)[1], hf.load(HF / "qwen2")[1])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.9.mlp.up_proj.weight": np.zeros(3)}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


BROKEN = {
    "missing": (drop_tensor, r"missing model\.layers\.1\.mlp\.up_proj\.weight"),
    "unexpected": (add_tensor, r"unexpected model\.layers\.9\.mlp\.up_proj\.weight"),
    "truncated": (truncate, "damaged safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json: no such file"),
    "too deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "not readable as JSON"),
    "not json": (lambda f: (f / "config.json").write_text("{"), "not readable as JSON"),
    "shape": (
        lambda f: edit_config(f, intermediate_size=99),
        r"mlp\.down_proj\.weight has shape \(96, 192\)",
    ),
    "vocab": (lambda f: edit_config(f, vocab_size=513), r"embed_tokens\.weight has shape \(512, 96\)"),
    "other architecture": (lambda f: edit_config(f, model_type="llama"), r"unexpected .*k_norm"),
    "no type": (lambda f: edit_config(f, model_type=["qwen3"]), r"model_type \['qwen3'\] is not supported"),
    "no layer types": (lambda f: edit_config(f, layer_types=3), "layer_types 3 is not supported"),
    "unknown type": (lambda f: edit_config(f, model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "'yarn'"),
    "window": (lambda f: edit_config(f, use_sliding_window=True), "use_sliding_window=True is not supported"),
    "layer types": (lambda f: edit_config(f, layer_types=["sliding_attention"]), "layer_types"),
    "activation": (lambda f: edit_config(f, hidden_act="gelu"), "hidden_act='gelu'"),
    "bias": (lambda f: edit_config(f, attention_bias=True), "attention_bias"),
    "heads": (lambda f: edit_config(f, num_key_value_heads=3), "not a multiple"),
    "no field": (
        lambda f: edit_config(f, hidden_size=...),
        "hidden_size must be a positive integer, found None",
    ),
    "wrong type": (lambda f: edit_config(f, num_hidden_layers="3"), "num_hidden_layers must be"),
    "eps": (lambda f: edit_config(f, rms_norm_eps=float("nan")), "rms_norm_eps must be"),
}


def test_a_dataset_is_told_from_a_model(tmp_path: Path) -> None:
    for name in ("manifest.json", "interactions.npz"):
        (tmp_path / name).touch()
    trains = rf"--set data\.path={tmp_path} --set train\.out="
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path}: is a dataset .* first give .* --data={tmp_path}, .*{trains}"
    ):
        checkpoint.load(tmp_path)
    (tmp_path / "tree.catalog.jsonl").touch()
    with pytest.raises(
        CheckpointError, match=r"and no model: train one on it .* --set data\.catalog=tree --set train"
    ):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused_by_name(name: str, tmp_path: Path) -> None:
    breaks, message = BROKEN[name]
    folder = copy("qwen3", tmp_path / "m")
    breaks(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder)


def test_shard_names_stay_in_the_folder(tmp_path: Path) -> None:
    folder = copy("qwen3", tmp_path / "m")
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        checkpoint.load(folder)


@pytest.mark.parametrize("index", [[], {"weight_map": {"model.norm.weight": 3}}])
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:
    folder = copy("qwen3", tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="damaged safetensors"):
        checkpoint.load(folder)


def test_own_checkpoint_of_another_architecture(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "own", *hf.load(HF / "qwen2"))
    shutil.copy(HF / "qwen3" / "config.json", tmp_path / "own" / "config.json")
    (tmp_path / "own" / "digests.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing layers\.q_norm.*unexpected layers\.bq"):
        checkpoint.load(tmp_path / "own")


def test_damaged_own_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    checkpoint.save(folder, *hf.load(HF / "qwen2"))
    for path in (folder / "params").rglob("*"):
        if path.is_file() and path.name not in ("_METADATA", "_CHECKPOINT_METADATA"):
            path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged checkpoint"):
        checkpoint.load(folder)


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, params = hf.load(HF / "qwen2")
    bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=bytes_))
    with pytest.raises(
        CheckpointError, match=r"the disk is full: a checkpoint needs \d+\.\d MB, \d+\.\d MB are free"
    ):
        checkpoint.save(tmp_path / "own", cfg, params)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    cfg, params = hf.load(HF / "qwen2")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written there: Not a directory"):
        checkpoint.save(tmp_path / "file" / "model", cfg, params)

    with pytest.raises(CheckpointError, match="cannot be written there: Not a directory"):
        checkpoint.require_writable(tmp_path / "file")
    checkpoint.require_writable(tmp_path / "not" / "yet" / "there")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # asking leaves nothing
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match="holds something else than a model"):
        checkpoint.save(tmp_path / "precious", cfg, params)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"

    def disk_full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    checkpoint.save(tmp_path / "own", cfg, params)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(tmp_path / "own", cfg, params, disk_full)
    assert_same_bits(checkpoint.load(tmp_path / "own")[1], params)  # the older one is whole
    (tmp_path / f".own.{DEAD}.partial" / "params").mkdir(parents=True)  # what a killed process leaves
    checkpoint.save(tmp_path / "own", cfg, params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "own", "precious"]
    (tmp_path / "own").rename(tmp_path / f".own.{DEAD}.partial")  # what a kill between the two renames leaves
    (tmp_path / f".own.{DEAD}.old").mkdir()
    checkpoint.require_writable(tmp_path / "own")
    assert_same_bits(checkpoint.load(tmp_path / "own")[1], params)
    (tmp_path / "own").rename(tmp_path / "kept")
    (tmp_path / f".own.{DEAD}.old" / "params").mkdir(
        parents=True
    )  # and one after them, of a model that was moved
    checkpoint.require_writable(tmp_path / "own")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "kept", "precious"]
    writing = tmp_path / f".own.{os.getppid()}.partial"
    writing.mkdir()
    checkpoint.require_writable(tmp_path / "own")
    assert writing.exists(), "somebody is writing it"
    (tmp_path / f".own.{os.getpid()}.partial").mkdir()  # of an earlier process that had our number
    checkpoint.require_writable(tmp_path / "own")
    assert not (tmp_path / f".own.{os.getpid()}.partial").exists()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    cfg, params = hf.load(HF / "qwen2")
    for name in ("real", "not_yet"):
        (tmp_path / f"link_to_{name}").symlink_to(tmp_path / name)
    (tmp_path / "real").mkdir()
    for name in ("real", "not_yet"):
        checkpoint.save(tmp_path / f"link_to_{name}", cfg, params)
        assert (tmp_path / f"link_to_{name}").is_symlink()
        assert_same_bits(checkpoint.load(tmp_path / name)[1], params)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("write", [checkpoint.save, hf.export])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, write: Any, value: float) -> None:
    cfg, params = hf.load(HF / "qwen2")
    layers = replace(params.layers, wq=params.layers.wq.at[1, 2, 3].set(value))
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", cfg, replace(params, layers=layers))
    with pytest.raises(CheckpointError, match=r"model.*: layers\.wq holds what is no finite number"):
        checkpoint.load(tmp_path / "model")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such model folder"):
        checkpoint.load(tmp_path / "nothing")
