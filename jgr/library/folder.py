# SPDX-License-Identifier: Apache-2.0
"""The files of a library (RCLLM-4): what `jgr kv library` writes and a server maps.

`library.json` says what it is of, `prototypes.npy` has a record for each prototype, and `kv.npy` its keys, as they are
before rope, and values in the model's own dtype; `sums.json` holds the SHA-256 of both, which is compared as a server
starts. How a library is written: building.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.files import read_whole, writing
from jgr.library.prototypes import Prototypes, Settings

FORMAT = 2
ABOUT, RECORDS, KV, SUMS = "library.json", "prototypes.npy", "kv.npy", "sums.json"
_RECORD = np.dtype([(name, "<i8") for name in Prototypes._fields])


class About(msgspec.Struct, frozen=True):
    """What a library is of.

    identity: of the model and the text before a history, see `identity`. dtype: of the keys and values. prototypes:
    their number. search: how the nearest is found, with which `recall` on held-out tokens; whose `coverage` says, for
    some sizes of the pool, the shares with a prototype at a cosine of at least .99 and .9. model, texts: for people.
    """

    format: int
    identity: str
    dtype: str
    prototypes: int
    search: Settings
    recall: float
    coverage: list[dict[str, float]]
    model: str = ""
    texts: str = ""


def identity(revision: str, dtype: str, shape: tuple[int, int, int], prefix: npt.NDArray[np.int32]) -> str:
    """What a library and a server must have in common. revision: of the model. shape: layers, key/value heads and head
    size. prefix: [t], the prompt's tokens before the history."""
    lead = "-".join(map(str, prefix.tolist()))
    return f"{revision}/{dtype}/{'x'.join(map(str, shape))}/{lead}"


class LibraryFolder:
    """A library whose keys and values are mapped. Raises UserError where it is missing, damaged or of another model.

    prototypes: their records. kv: [n, layers, 2, key/value heads, head size], of the dtype's bits.
    """

    def __init__(self, path: Path, wanted: str) -> None:
        self.path = path
        self.about = read_about(path)
        if self.about.identity != wanted:
            raise UserError(
                f"{path}: is of another model, or of another prompt.template ({self.about.identity}; this model's is "
                f"{wanted}); build it again with jgr kv library"
            )
        self.prototypes, self.kv = read_records(path), _mapped(path / KV)
        count = self.about.prototypes
        if (
            len(self.prototypes.keys) != count
            or self.kv.ndim != 5
            or len(self.kv) != count
            or self.kv.dtype != bits(self.about.dtype)
        ):
            raise UserError(f"{path}: {RECORDS} and {KV} are not those of {ABOUT}; build it again")
        _require_sums(path)

    def __len__(self) -> int:
        return self.about.prototypes


def bits(dtype: str) -> np.dtype[Any]:
    """The unsigned integers that stand for numbers of a dtype in files, which know no bfloat16."""
    return np.dtype("<u2" if dtype in ("bfloat16", "float16") else "<u4")


def write_about(path: Path, about: About) -> None:
    with writing(path / ABOUT, UserError) as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(about)) + b"\n")


def read_records(path: Path) -> Prototypes:
    """Reads a library's prototypes; UserError where the file is missing or cut short."""
    records = _mapped(path / RECORDS)
    if records.dtype != _RECORD or records.ndim != 1:
        raise UserError(f"{path}: {RECORDS} is not what jgr kv library writes; build it again")
    return Prototypes(*(np.ascontiguousarray(records[name]) for name in Prototypes._fields))


def write_records(path: Path, prototypes: Prototypes) -> None:
    records = np.zeros(len(prototypes.keys), _RECORD)
    for name, column in prototypes._asdict().items():
        records[name] = column
    np.save(path / RECORDS, records)


def read_about(path: Path) -> About:
    """What a library says of itself. UserError where it is none."""
    if not path.is_dir():
        raise UserError(
            f"cache.library: there is no folder {path}; jgr kv library MODEL --out={path} makes it"
        )
    try:
        about = msgspec.json.decode(read_whole(path / ABOUT, UserError), type=About)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path / ABOUT}: is not what jgr kv library writes: {error}") from None
    if about.format != FORMAT:
        raise UserError(f"{path}: was made by another version of jgr; build it again")
    return about


def write_sums(path: Path) -> None:
    """Say what the files hold, once they are whole."""
    with writing(path / SUMS, UserError) as stream:
        stream.write(msgspec.json.encode({name: _sum(path / name) for name in (RECORDS, KV)}) + b"\n")


def _require_sums(path: Path) -> None:
    try:
        sums = msgspec.json.decode(read_whole(path / SUMS, UserError), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path / SUMS}: is not what jgr kv library writes: {error}") from None
    for name in (RECORDS, KV):
        if sums.get(name) != _sum(path / name):
            raise UserError(f"{path}: {name} is damaged; build it again with jgr kv library")


def _sum(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _mapped(path: Path) -> npt.NDArray[Any]:
    load: Callable[..., npt.NDArray[Any]] = np.load
    try:
        return load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{path}: cannot be read, or is cut short: {error}; build the library again"
        ) from None
