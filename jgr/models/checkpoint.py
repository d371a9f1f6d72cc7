# SPDX-License-Identifier: Apache-2.0
"""A model folder: config.json beside either safetensors (Hugging Face) or params/ (Orbax, our own).

folder/config.json        the architecture, in Hugging Face's spelling where it has one for it
folder/params/            Orbax, or
folder/digests.json       of our own: what each file holds, see jgr.models.model_files
folder/*.safetensors      single or sharded
folder/tokenizer.json     the tokenizers library's file
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jgr.config import ConfigError
from jgr.models import hf, lazy_decoder
from jgr.models.decoder import DecoderConfig
from jgr.models.devices import ON_ONE, ONE, Devices, Placement, of_generator
from jgr.models.generators import GeneratorConfig, GeneratorParams, generator
from jgr.models.hf import LARGEST_ITEM
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.model_files import ModelFiles, write_digests
from jgr.models.params import CheckpointError, PyTree, Spec, abstract, by_name, check_finite, count
from jgr.models.quantize import Quantization, is_matrix, of_array, served_bytes
from jgr.models.room import require_memory
from jgr.ops.dispatch import target_platform

if TYPE_CHECKING:
    from jgr.models.stored import StoredArrays

SPARE_BYTES = 1 << 20
"""Disk space that a checkpoint needs beside its arrays, with room to spare."""

_TO_CONFIG: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    DecoderConfig: hf.to_config,
    LazyConfig: lazy_decoder.to_config,
}


def load(
    folder: Path,
    dtype: Any = jnp.float32,
    files: ModelFiles | None = None,
    devices: Devices = ONE,
    kind: Quantization | None = None,
) -> tuple[GeneratorConfig, GeneratorParams]:
    """Read a model folder of any kind; the weights are cast to dtype. Raises CheckpointError.

    files: those of the folder, where the caller asks for their revision too, so that they are hashed once. devices:
    where the weights go; ConfigError where the model cannot be divided over them. kind: how matrices are held; empty:
    as the folder has them. None: as an empty one, but a quantised folder is refused. ConfigError where the model cannot
    be held so.
    """
    files = files or ModelFiles(folder)
    require_size(folder, files)
    files.check()
    if (folder / "params").is_dir():
        cfg = hf.parse_file(folder / "config.json", _parse)
        if kind and isinstance(cfg, LazyConfig) and cfg.experts:
            raise ConfigError(
                f"model.quantize: {kind}, but {folder} is a model with experts, whose weights stay"
            )
        served, placement = of_generator(cfg, devices)
        return served, restore(folder, generator(cfg).spec(cfg), dtype, placement, kind or "")
    return hf.load(folder, dtype, devices, kind)


def require_size(folder: Path, files: ModelFiles) -> None:
    """Raise CheckpointError where a folder's files are larger than the model that config.json describes can be.

    files: the folder's. Of a damaged or huge file that is told at once, and not when it has been hashed.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder (model.path)")
    files.check_sizes()
    if (folder / "params").is_dir():
        cfg = hf.parse_file(folder / "config.json", _parse)
        files.require_size(most_bytes(generator(cfg).spec(cfg)))
    else:
        files.require_size(hf.most_bytes(folder), "")


def most_bytes(declared: PyTree) -> int:
    """The most bytes that params/ can hold. declared: the pytree of the parameters' params.Spec."""
    return LARGEST_ITEM * count(declared) + SPARE_BYTES


def served_dtype(folder: Path, wanted: str) -> str:
    """The type of a generator's weights and activations: model.dtype, or where it is empty what suits the device.

    That is float32, but on a GPU bfloat16 for a folder whose config.json says that its weights have 16 bits: products
    of these are several times as fast there, and slower on most CPUs. Raises CheckpointError for a damaged file.
    """
    if wanted or target_platform() != "gpu":
        return wanted or "float32"
    stored = hf.parse_file(folder / "config.json", lambda raw: raw.get("dtype") or raw.get("torch_dtype"))
    return "bfloat16" if stored in ("bfloat16", "float16") else "float32"


def _parse(raw: Mapping[str, Any]) -> GeneratorConfig:
    own = raw.get("model_type") == lazy_decoder.MODEL_TYPE
    return lazy_decoder.parse_config(raw) if own else hf.parse_config(raw)


def save(
    folder: Path,
    cfg: GeneratorConfig,
    params: GeneratorParams,
    write_beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a generator's model folder, see `write`."""
    write(folder, _TO_CONFIG[type(cfg)](cfg), params, write_beside)


def write(
    folder: Path,
    config: Mapping[str, Any],
    params: PyTree,
    write_beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write config.json and params/, and what `write_beside(folder)` adds; replaces an older folder.

    The folder appears whole or not at all: it is written aside, then renamed.
    """
    import orbax.checkpoint as ocp  # 2-3 s of import time, needed by no command that only reads safetensors

    with replacing(folder) as aside:
        require_space(aside, params)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(aside / "params", params)
        write_beside(aside)


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder aside, to which a model folder but for digests.json is written; it then replaces `folder`.

    Raises CheckpointError for whatever fails; then `folder` is as it was.
    """
    folder = folder.resolve()
    require_writable(folder)
    aside = _aside(folder)
    try:
        aside.mkdir(parents=True)
        yield aside
        write_digests(aside)
        older = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.rename(older)  # after a kill before the next line, `require_writable` does it
        aside.rename(folder)
        shutil.rmtree(older, ignore_errors=True)
    except Exception as error:  # a full disk is an OSError here and other things in Orbax and tensorstore
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: the checkpoint could not be written: {error}") from error


def require_writable(folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint can be written there; cheap, to be asked before the work is done.

    A folder that is there must be empty or a checkpoint of ours: it will be replaced. Clears away what a killed
    process left half-written, ends a replacement that it had begun, and makes no folder itself.
    """
    folder = folder.resolve()
    aside = _aside(folder)
    try:
        for left in sorted(aside.parent.glob(f".{glob.escape(folder.name)}.*.[op]*")):
            *_, writer, kind = left.name.split(".")
            if kind not in ("old", "partial") or _is_another(writer):
                continue
            if kind == "old" and not folder.exists() and left.with_suffix(".partial").exists():
                left.with_suffix(".partial").rename(folder)  # whole, for the old model makes way last of all
            shutil.rmtree(left, ignore_errors=True)
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "params").is_dir():
            raise CheckpointError(f"{folder}: holds something else than a model of ours; name a new folder")
        there = next(parent for parent in aside.parents if parent.exists())
        probe = there / aside.name
        probe.mkdir()
        probe.rmdir()
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(20, "Not a directory")
    except OSError as error:
        raise CheckpointError(f"{folder}: a checkpoint cannot be written there: {error.strerror}") from None


def require_space(folder: Path, tree: PyTree) -> None:
    """Raise CheckpointError unless the disk has room for the arrays of `tree`.

    Orbax fails on a full disk with hundreds of lines from its threads, and leaves a half-written folder.
    """
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: the disk is full: a checkpoint needs {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
        )


def _is_another(process: str) -> bool:
    """Whether another process of this number runs. In a container every trainer may have the same number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    except PermissionError:
        pass  # it is another user's
    return int(process) != os.getpid()


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.partial")


def restore(
    folder: Path,
    declared: PyTree,
    dtype: Any = jnp.float32,
    placement: Placement = ON_ONE,
    kind: Quantization = "",
) -> PyTree:
    """The parameters that `write` left in folder/params/, cast to dtype. declared: the pytree of their params.Spec.

    kind: how matrices are held; then one stack of them at a time is on the host as it is stored.

    Raises CheckpointError for a damaged checkpoint, where there is no room for it, and naming every parameter that is
    missing or of another shape.
    """
    from jgr.models.stored import StoredArrays  # TensorStore takes .3 s to import

    path = folder / "params"
    specs, tree = by_name(declared), abstract(declared, dtype)
    ModelFiles(folder).require_size(most_bytes(declared))
    try:
        stored = StoredArrays(path.absolute(), specs)
        require_memory(served_bytes(specs.values(), dtype, kind), 3 * stored.largest)
        if kind:
            arrays = [_put(name, spec, stored, dtype, kind, placement) for name, spec in specs.items()]
        else:
            read = zip(specs.values(), stored.read(list(specs)), strict=True)
            arrays = [placement.put(spec, array, dtype) for spec, array in read]
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    params = jax.tree.unflatten(jax.tree.structure(tree), arrays)
    check_finite(path, params)
    return params


def _put(
    name: str, spec: Spec, stored: StoredArrays, dtype: Any, kind: Quantization, placement: Placement
) -> Any:
    array = next(stored.read([name]))
    if is_matrix(spec):
        return of_array(name, spec, array, kind, placement)
    return placement.put(spec, array, dtype)
