# SPDX-License-Identifier: Apache-2.0
"""Which version of a model a folder holds, and whether its files are those that were written.

The one idea: the name is the content. Weights, config.json and tokenizer.json are hashed as they lie on disk, so
equal folders have equal revisions on every machine, and nobody has to count versions. The catalog has a version of
its own, and answers name both.

The same digests tell damage. A checkpoint of ours has them in digests.json, written last: a file of another size or
content is refused before anything else reads it. A folder without them, such as a Hugging Face one, is compared with
what this process found there before: other bytes in a file of the same inode, size and time are damage, since whoever
writes a file changes one of these.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct

from jgr import stopping
from jgr.fields import one_line, require
from jgr.files import MAX_FILE_BYTES, is_pipe, read_whole, reading, writing
from jgr.models import config_file, hub
from jgr.models.params import CheckpointError

REVISION_DIGITS = 8
DIGESTS = "digests.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
HASHED_AT_ONCE = 4
MOST_REMEMBERED = 4096
MAX_BYTES = 64 << 20
"""The largest list of files that is read."""
HASHED_BYTES = 1 << 20
"""So much of a file is hashed between two questions whether the load is to stop."""
READABLE = {"config.json": config_file.MAX_BYTES, TOKENIZER: MAX_FILE_BYTES, INDEX: MAX_BYTES}
"""The most bytes of a file that its reader takes, so that a larger one need not be hashed to be refused."""

Stamp = tuple[str, int, int, int]
"""A file's name in the folder, and its inode, size and time of change."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_remembered: dict[tuple[Path, Stamp], bytes] = {}


class FileDigest(Struct, frozen=True, forbid_unknown_fields=True):
    """What one file holds."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Digests(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of digests.json: what each file holds, by its path in the folder."""

    files: dict[str, FileDigest]


class ModelFiles:
    """The files of a model folder as they are found at construction.

    `require_size`, called first, refuses those that are larger than their model can be, without hashing them. `check`,
    called before they are read, refuses damaged ones. `revision`, asked for when everything has been read, tells
    whether somebody wrote to them meanwhile. The last two hash each file, once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._found = _stamps(self._folder)
        self._digests: dict[str, bytes] = {}
        self._wanted: Mapping[str, FileDigest] | None = None
        self._sizes_checked = self._checked = False

    @property
    def unchanged(self) -> bool:
        """Whether the folder has the same files as at construction, by their names, sizes and times."""
        try:
            return _stamps(self._folder) == self._found
        except CheckpointError:
            return False

    def check(self) -> None:
        """Raise CheckpointError, which names the file, where one is not as digests.json says.

        A checkpoint of ours without digests.json is an older one: that is logged. Further calls do nothing.
        """
        if self._checked:
            return
        self.check_sizes()
        self._compare_with_wanted(self._found_names)
        if self._wanted is None and (self._folder / "params").is_dir():
            _log.warning("%s: has no %s, so damaged weights may not be noticed", self._folder, DIGESTS)
        self._checked = True

    def check_sizes(self) -> None:
        """Do what `check` does by the names and sizes of files alone, and by the content of config.json.

        No weights are read. Raises CheckpointError also for a file that is larger than its reader takes.
        """
        if self._sizes_checked:
            return
        sizes = {name: size for name, _, size, _ in self._found}
        for name, most in READABLE.items():
            if sizes.get(name, 0) > most:
                raise CheckpointError(f"{self._folder / name}: holds more than {most} bytes")
        if os.path.lexists(self._folder / DIGESTS):
            self._wanted = self._read_digests()
            self._compare_sizes(sizes, self._wanted)
            # What its model needs is read from it next, so it must be what was written.
            self._compare_with_wanted([name for name in self._found_names if name == "config.json"])
        self._sizes_checked = True

    def _read_digests(self) -> Mapping[str, FileDigest]:
        path = self._folder / DIGESTS
        try:
            return msgspec.json.decode(read_whole(path, CheckpointError, MAX_BYTES), type=Digests).files
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: damaged checkpoint: {one_line(error)}; restore the folder"
            ) from None

    def _compare_sizes(self, sizes: Mapping[str, int], wanted: Mapping[str, FileDigest]) -> None:
        for name in sorted(wanted.keys() | sizes.keys()):
            if name not in sizes:
                raise CheckpointError(
                    f"{self._folder / name}: damaged checkpoint: it is missing, {DIGESTS} names it"
                )
            if name not in wanted:
                raise CheckpointError(
                    f"{self._folder / name}: damaged checkpoint: {DIGESTS} does not name it"
                )
            if sizes[name] != wanted[name].bytes:
                raise CheckpointError(
                    f"{self._folder / name}: damaged checkpoint: it has {sizes[name]} bytes, "
                    f"{DIGESTS} says {wanted[name].bytes}"
                )

    def _compare_with_wanted(self, names: Sequence[str]) -> None:
        if self._wanted is None:
            return
        found = self._hashed(names)
        for name in names:
            if found[name].hex() != self._wanted[name].sha256:
                raise CheckpointError(
                    f"{self._folder / name}: damaged checkpoint: its SHA-256 is not that of {DIGESTS}"
                )

    def require_size(self, largest: int, place: str = "params") -> None:
        """Raise CheckpointError where a place of the folder holds more than `largest` bytes, which no such model needs.

        place: a folder in it; "": the files of weights of a Hugging Face folder.
        """
        sizes = ((name, size) for name, _, size, _ in self._found)
        if place:
            held = sum(size for name, size in sizes if name.startswith(f"{place}/"))
        else:
            held = sum(size for name, size in sizes if name not in READABLE)
        if held > largest:
            what = f"{self._folder / place}:" if place else f"{self._folder}: its weights:"
            raise CheckpointError(
                f"{what} holds {held} bytes, its model needs at most {largest}; restore the folder"
            )

    def revision(self) -> str:
        """The first digits of the content's SHA-256, and for a folder of the Hugging Face hub those of the commit.

        CheckpointError where the files are not those found at first, or are others than this process found before
        in files that nobody has written to.
        """
        try:
            digests = self._hashed()
        except CheckpointError:
            digests = None
        if digests is None or not self.unchanged:
            raise CheckpointError(f"{self._folder}: the model changed while it was read; load it again")
        whole = hashlib.sha256()
        for stamp in self._found:
            name, digest = stamp[0], digests[stamp[0]]
            self._compare(stamp, digest)
            whole.update(len(name).to_bytes(4) + name.encode() + digest)
        commit = hub.commit_of(self._folder)
        return whole.hexdigest()[:REVISION_DIGITS] + (f"-{commit}" if commit else "")

    def identity(self) -> str:
        """16 hex digits of the SHA-256 of all files but tables of embeddings: what these must be made for."""
        whole = hashlib.sha256()
        for name, digest in self._hashed().items():
            if not name.startswith("embeddings/"):
                whole.update(len(name).to_bytes(4) + name.encode() + digest)
        return whole.hexdigest()[:16]

    def weights(self) -> str:
        """The SHA-256 of all files that parameters are read from, config.json with them. Raises as `check` does."""
        self.check()
        whole = hashlib.sha256()
        for name, digest in self._hashed().items():
            if name != TOKENIZER:
                whole.update(len(name).to_bytes(4) + name.encode() + digest)
        return whole.hexdigest()

    def _compare(self, stamp: Stamp, digest: bytes) -> None:
        with _lock:
            known = _remembered.pop((self._folder, stamp), digest)
            _remembered[self._folder, stamp] = known
            while len(_remembered) > MOST_REMEMBERED:
                del _remembered[next(iter(_remembered))]
        if known != digest:
            raise CheckpointError(
                f"{self._folder / stamp[0]}: damaged: its content has changed, and its size and time have not; "
                "restore it, or write it again"
            )

    @property
    def _found_names(self) -> list[str]:
        return [name for name, *_ in self._found]

    def _hashed(self, names: Sequence[str] | None = None) -> Mapping[str, bytes]:
        """The digests of the files of these names, in their order; None: of all."""
        names = self._found_names if names is None else names
        if missing := [name for name in names if name not in self._digests]:
            hashed = stopping.carried(self._hash)
            with ThreadPoolExecutor(HASHED_AT_ONCE, "jgr-hash") as pool:  # hashlib lets others run meanwhile
                self._digests.update(zip(missing, pool.map(hashed, missing), strict=True))
        return {name: self._digests[name] for name in names}

    def _hash(self, name: str) -> bytes:
        digest, part = hashlib.sha256(), bytearray(HASHED_BYTES)
        with reading(self._folder / name, CheckpointError) as file, memoryview(part) as view:
            while read := cast(io.BufferedReader, file).readinto(view):
                stopping.check()
                digest.update(view[:read])
        return digest.digest()


def write_digests(folder: Path) -> None:
    """Write digests.json, once all other files of a checkpoint are there. Raises CheckpointError."""
    files = ModelFiles(folder)
    sizes = {name: size for name, _, size, _ in files._found}
    digests = Digests(
        {name: FileDigest(sizes[name], digest.hex()) for name, digest in files._hashed().items()}
    )
    with writing(folder / DIGESTS, CheckpointError) as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(digests), indent=1) + b"\n")


def weight_files(folder: Path) -> list[str]:
    """The names of a Hugging Face folder's weights: the shards that its index names, or the single file.

    Raises CheckpointError for an index that is none.
    """
    index = folder / INDEX
    if not os.path.lexists(index):
        return ["model.safetensors"]
    if is_pipe(index):
        raise CheckpointError(f"{index}: cannot be read: it is not a regular file")
    try:
        given: Any = json.loads(read_whole(index, CheckpointError, MAX_BYTES))
        shards = sorted(set(given["weight_map"].values()))
        outside = [shard for shard in shards if Path(shard).name != shard or "\0" in shard]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{index}: damaged safetensors: {one_line(repr(error))}") from None
    if outside:
        raise CheckpointError(f"{index}: shard {outside[0]!r} is not a plain file name")
    return shards


def check_folder(folder: str) -> None:
    """Raise UserError where a folder's name has a zero byte, or a pipe, a device or a socket stands for a file of its
    model: to open one may take for ever."""
    require("\0" not in folder, f"model.path: {folder!r} has a zero byte, which no folder's name has")
    _stamps(Path(folder))


def _stamps(folder: Path) -> list[Stamp]:
    """The stamp of each file that the model is read from, by name. Raises CheckpointError for pipes and devices, and
    where the folder cannot be listed."""
    paths = [folder / "config.json", folder / TOKENIZER, folder / DIGESTS]
    try:
        if (folder / "params").is_dir():
            paths += [*(folder / "params").rglob("*"), *(folder / "embeddings").glob("*.table")]
        else:
            paths.append(folder / INDEX)
            with contextlib.suppress(CheckpointError):  # whoever reads the weights refuses the index
                paths += (folder / name for name in weight_files(folder))
    except OSError as cause:  # such as one that is removed meanwhile
        raise CheckpointError(f"{folder}: cannot be read: {cause.strerror or cause}") from cause
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            name = path.relative_to(folder).as_posix()
            found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
        elif not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{path}: cannot be read: it is not a regular file")
    return sorted(stamp for stamp in found if stamp[0] != DIGESTS)
