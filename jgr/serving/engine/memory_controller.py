# SPDX-License-Identifier: Apache-2.0
"""Files of what was learnt for memory control, and the controller that a configuration names.

A file is NumPy's .npz: the base policy's weights and the boosted trees. It is untrusted: its size is bounded before
anything is unpacked, objects are refused by NumPy, and shapes are checked by `jgr.serving.policies.memory_models`.
memory_controller.npz is one that comes with jgr, made by `jgr train --config=controller`.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.config import MemoryConfig
from jgr.serving.policies.memory_control import Controller, Full, Pid, Ppo, Predictor, Static
from jgr.serving.policies.memory_models import BasePolicy, ControllerError, Trees
from jgr.serving.policies.memory_signals import Limits

SHIPPED = Path(__file__).with_name("memory_controller.npz")
MOST_BYTES = 4 << 20
"""The most that a file may hold, packed and unpacked."""
MOST_ARRAYS = 32


def read_controller(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a controller's file. Raises ControllerError, with the path, for a file that is none or too
    large."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ControllerError(f"{path}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ControllerError(f"{path}: a controller has at most {MOST_BYTES} bytes")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            sizes = [member.file_size for member in archive.infolist()]
        if len(sizes) > MOST_ARRAYS or sum(sizes) > MOST_BYTES:
            raise ControllerError(
                f"{path}: {len(sizes)} arrays of {sum(sizes)} bytes, at most {MOST_ARRAYS} of {MOST_BYTES} are read"
            )
        with np.load(io.BytesIO(content)) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (
        zipfile.BadZipFile,
        zlib.error,
        ValueError,
        EOFError,
        KeyError,
        OSError,
        NotImplementedError,
    ) as error:
        raise ControllerError(
            f"{path}: not a controller's file, or one that was cut short: {error}"
        ) from None


def write_controller(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write what `read_controller` reads."""
    save: Any = np.savez_compressed  # its types take the arrays for its flag
    with path.open("wb") as file:
        save(file, **arrays)


def make_controller(config: MemoryConfig, seed: int = 0) -> Controller:
    """The controller that memory.controller names. Raises ControllerError for a file that is not for it."""
    limits = Limits(config.least, config.most, config.split, config.limit_ms)
    if config.controller == "static":
        return Static(limits)
    if config.controller == "pid":
        return Pid(limits)
    path = Path(config.file) if config.file else SHIPPED
    try:
        arrays = read_controller(path)
    except ControllerError as error:
        raise ControllerError(f"memory.file: {error}") from None
    try:
        base, trees = (
            BasePolicy(arrays),
            Trees(arrays),
        )  # all of it, whichever is read: it comes from one training
    except ControllerError as error:
        raise ControllerError(f"memory.file: {path}: {error}") from None
    if config.controller == "predictor":
        return Predictor(limits, trees)
    return Ppo(limits, base) if config.controller == "ppo" else Full(limits, base, seed=seed)
