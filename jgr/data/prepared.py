# SPDX-License-Identifier: Apache-2.0
"""A prepared dataset on disk: the folder that `jgr prepare` writes and all other commands read.

The one idea: `manifest.json` is written last and names every other file with its size and hash, so a folder
without it, or one that differs from it, is never taken for a dataset.

A folder holds
- items.jsonl: {"item_id", "metadata"}, a line for each item; the line number is the item's row. Items with
  more training interactions come first, equal ones in the order first seen. If the source brings semantic
  ids, the order is the source's;
- users.jsonl: a line for each user, the id as a JSON string;
- interactions.npz: `Arrays`;
- title_tokenizer.json, if it was asked for: a byte-level BPE of the items' titles;
- catalog.jsonl, once there are semantic ids: the same items in the same order. It is in the manifest if the
  source brings the ids; otherwise `jgr ids` adds it. NAME.catalog.jsonl is one with a name (jgr ids --name).
"""

from __future__ import annotations

import hashlib
import tokenize
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.data.interactions import DataError, Examples, Interactions, Ragged
from jgr.files import read_lines, read_whole, reading, require_regular

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

FORMAT = 1
MANIFEST, ITEMS, USERS = "manifest.json", "items.jsonl", "users.jsonl"
INTERACTIONS, TITLES, CATALOG = "interactions.npz", "title_tokenizer.json", "catalog.jsonl"
SPLITS = ("train", "valid", "test")
# Above this size a file's length is compared, not its hash: loading must not take longer than reading.
HASHED_BYTES = 64 << 20
MAX_ID_CHARS = 512
_MILLISECONDS = 10**11  # 1973
UNITS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The units of times, by the name that the manifest gives as time_unit."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A dataset without semantic ids.

    item_ids: [n]. metadata: [n] JSON objects, {} for an item without. manifest: the inputs, parameters and outputs.
    """

    item_ids: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]
    interactions: Interactions
    manifest: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Arrays:
    """All users' events end to end, and the examples as positions among them.

    rows: [total] int32 items. offsets: [u + 1] int64; user i's events are rows[offsets[i]:offsets[i + 1]],
    oldest first. train_stops: [u] int64, the end of each user's events that may be trained on.
    train, valid, test: [4, n] int64: user, start and stop of the history, position of the target.
    times: [total] int64 in the source's unit, or None. actions: [total] int32 bits, named by the manifest's "actions".
    scenarios: [total] int32, -1: not known. actions and scenarios are both there, or both None.
    """

    rows: Int32
    offsets: Int64
    train_stops: Int64
    train: Int64
    valid: Int64
    test: Int64
    times: Int64 | None = None
    actions: Int32 | None = None
    scenarios: Int32 | None = None

    @classmethod
    def of(cls, interactions: Interactions) -> Arrays:
        """The arrays of `interactions`. Its users' events must lie end to end, each target right after its history."""

        def windows(examples: Examples) -> Int64:
            stops = examples.histories.stops
            return np.stack([examples.users.astype(np.int64), examples.histories.starts, stops, stops])

        whole = interactions.sequences
        offsets = np.append(whole.starts, len(whole.rows))
        train, valid, test = (windows(getattr(interactions, split)) for split in SPLITS)
        return cls(whole.rows, offsets, whole.stops, train, valid, test)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def check(self, n_items: int, user_ids: tuple[str, ...]) -> None:
        """Raise DataError if the parts do not fit together, or an example's history reaches its target.

        An example stays within its user's events, its history ends at or before its target, a training target
        lies before the user's train_stop, a valid or test target does not, and no event is older than the one
        before it.
        """
        offsets, total = self.offsets, len(self.rows)
        if len(offsets) != len(user_ids) + 1 or offsets[0] != 0 or offsets[-1] != total:
            raise DataError(f"the events of {len(offsets) - 1} users do not cover {len(user_ids)} users")
        empty = np.flatnonzero(np.diff(offsets) < 1)
        if len(empty):
            raise DataError(f"user {user_ids[empty[0]]!r} has no events")
        if not 0 <= self.rows.min() <= self.rows.max() < n_items:
            raise DataError(f"items are 0 to {n_items - 1}, found {self.rows.min()} to {self.rows.max()}")
        if len(self.train_stops) != len(user_ids) or not _between(
            offsets[:-1], self.train_stops, offsets[1:]
        ):
            raise DataError("a user's training events end outside the user's events")
        for split in SPLITS:
            self._check_split(split, user_ids)
        if self.times is not None:
            self._check_times(user_ids)
        for name, least in (("actions", 0), ("scenarios", -1)):
            values = getattr(self, name)
            if values is not None and (len(values) != total or values.min() < least):
                raise DataError(f"{name}: not as many as events, or one is below {least}")
        if (self.actions is None) != (self.scenarios is None):
            raise DataError("there are actions and no scenarios, or the other way round")

    def _check_split(self, split: str, user_ids: tuple[str, ...]) -> None:
        users, starts, stops, targets = getattr(self, split)
        if len(users) and not 0 <= users.min() <= users.max() < len(user_ids):
            raise DataError(f"{split}: names a user that does not exist")
        inside = (self.offsets[users] <= starts) & (starts < stops) & (targets < self.offsets[users + 1])
        learnt = targets < self.train_stops[users]
        for holds, what in [
            (inside, "an example leaves the user's events or has no history"),
            (stops <= targets, "the split leaks: a history holds its own target or later events"),
            (learnt == (split == "train"), "the split leaks: training reaches a held-out target"),
        ]:
            if not holds.all():
                raise DataError(f"{split}: user {user_ids[users[np.argmin(holds)]]!r}: {what}")

    def _check_times(self, user_ids: tuple[str, ...]) -> None:
        if self.times is None or len(self.times) != len(self.rows):
            raise DataError("there are not as many times as events")
        earlier = np.diff(self.times) < 0
        earlier[self.offsets[1:-1] - 1] = False
        if earlier.any():
            user = int(np.searchsorted(self.offsets, np.argmax(earlier), side="right")) - 1
            raise DataError(f"user {user_ids[user]!r}: the events are not in order of time")

    def interactions(
        self, user_ids: tuple[str, ...], actions: tuple[str, ...] = (), time_unit: str = ""
    ) -> Interactions:
        """Turn checked arrays into examples. Raises DataError if the names of the bits, `actions`, do not fit.

        time_unit: what the times count, of UNITS_PER_SECOND; "": seconds or milliseconds, by their size.
        """
        if (self.actions is None) != (not actions):
            raise DataError("actions have names that the manifest lacks, or the other way round")
        if self.actions is not None and int(self.actions.max()) >> len(actions):
            raise DataError(f"actions: {int(self.actions.max())} has more bits than the {len(actions)} names")
        seconds = None if self.times is None else self.times // per_second(self.times, time_unit)

        def examples(windows: Int64) -> Examples:
            users, starts, stops, targets = windows
            histories = replace(sequences, starts=starts, stops=stops)
            asked = None if seconds is None else seconds[targets]
            return Examples(histories, self.rows[targets], users.astype(np.int32), asked)

        sequences = Ragged(
            self.rows, self.offsets[:-1], self.train_stops, seconds, self.actions, self.scenarios
        )
        train, valid, test = (examples(windows) for windows in (self.train, self.valid, self.test))
        return Interactions(user_ids, sequences, train, valid, test, actions)


def per_second(times: Int64, unit: str) -> int:
    """How many of the times' units make a second. Without a unit, numbers that would be later than 5000 AD in seconds
    are milliseconds."""
    return UNITS_PER_SECOND[unit or ("ms" if times.max(initial=0) > _MILLISECONDS else "s")]


def _between(low: Int64, values: Int64, high: Int64) -> bool:
    return bool(((low <= values) & (values <= high)).all())


def load_prepared(folder: str | Path) -> Prepared:
    """Read what `jgr prepare` wrote. Raises DataError, naming the file that is missing, cut short or changed."""
    folder = Path(folder)
    manifest = load_manifest(folder)
    problem = first_difference(folder, manifest["outputs"], HASHED_BYTES)
    if problem:
        raise DataError(f"{problem}; run jgr prepare again into an empty folder")
    item_ids, metadata = read_items(folder / ITEMS)
    user_ids = read_ids(folder / USERS)
    arrays = load_arrays(folder / INTERACTIONS)
    try:
        arrays.check(len(item_ids), user_ids)
        actions, unit = tuple(manifest.get("actions", ())), manifest.get("time_unit", "")
        interactions = arrays.interactions(user_ids, actions, unit)
    except DataError as cause:
        raise DataError(f"{folder / INTERACTIONS}: {cause}") from None
    return Prepared(item_ids, metadata, interactions, manifest)


def catalog_path(folder: Path, name: str = "") -> Path:
    """The file of a dataset's catalog. name: "" for the one without a name."""
    return folder / (f"{name}.{CATALOG}" if name else CATALOG)


def catalog_names(folder: Path) -> list[str]:
    """The names of a dataset's catalogs, sorted; "" stands for the one without a name."""
    suffix = f".{CATALOG}"
    named = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"[!.]*{suffix}"))
    return [*([""] if (folder / CATALOG).exists() else []), *named]


def load_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder. Raises DataError if there is none, or `jgr prepare` did not write it."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder}: has no {MANIFEST}: jgr prepare did not run, or did not finish; run it")
    try:
        manifest = msgspec.json.decode(read_whole(path, DataError))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise DataError(f"{path}: not JSON: {cause}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: is not a manifest of format {FORMAT}; run jgr prepare again")
    outputs = _field(path, "outputs", manifest.get("outputs"), dict[str, FileRecord])
    _field(path, "actions", manifest.get("actions", []), list[str])
    unit = _field(path, "time_unit", manifest.get("time_unit", ""), str)
    if unit and unit not in UNITS_PER_SECOND:
        raise DataError(f"{path}: time_unit: {unit!r} is none of {', '.join(UNITS_PER_SECOND)}")
    known = {ITEMS, USERS, INTERACTIONS}
    if not known <= outputs.keys() <= known | {TITLES, CATALOG}:
        raise DataError(f"{path}: outputs must be {', '.join(sorted(known))}, found {sorted(outputs)}")
    return manifest


def _field(path: Path, name: str, value: Any, type_: Any) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as cause:
        raise DataError(f"{path}: {name}: {cause}") from None


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's entry for one file. bytes: its size."""

    bytes: int
    sha256: str


def record(path: Path) -> dict[str, Any]:
    """The size and sha256 of a file, not decompressed. Raises DataError if it cannot be read."""
    require_regular(path, DataError)
    try:
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return {"bytes": stream.tell(), "sha256": digest}
    except OSError as cause:
        raise DataError(f"{path}: cannot be read: {cause.strerror or cause}") from cause


def first_difference(folder: Path, records: dict[str, Any], hashed_bytes: int) -> str | None:
    """Compare files with their records: say what is wrong with the first that differs; None if all agree.

    hashed_bytes: files above this size are compared by size only.
    """
    for name, expected in records.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{path}: has {path.stat().st_size} bytes, the manifest says {expected['bytes']}"
        if expected["bytes"] <= hashed_bytes and record(path) != expected:
            return f"{path}: its content is not what the manifest says"
    return None


def read_items(path: Path) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...]]:
    """Read the ids and metadata from lines of {"item_id", "metadata"}. Raises DataError, naming the line."""

    class Line(msgspec.Struct, forbid_unknown_fields=True):
        item_id: str
        metadata: dict[str, Any]

    lines = _decoded(path, msgspec.json.Decoder(Line))
    item_ids = tuple(line.item_id for line in lines)
    _refuse_repeated(path, item_ids)
    return item_ids, tuple(line.metadata for line in lines)


def read_ids(path: Path) -> tuple[str, ...]:
    """Read a file of ids, each a JSON string in a line of its own. Raises DataError, naming the line."""
    ids: tuple[str, ...] = tuple(_decoded(path, msgspec.json.Decoder(str)))
    _refuse_repeated(path, ids)
    return ids


def _decoded(path: Path, decoder: msgspec.json.Decoder[Any]) -> list[Any]:
    values = []
    for number, line in read_lines(path, DataError):
        try:
            values.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
            raise DataError(f"{path}:{number}: {cause}") from None
    return values


def _refuse_repeated(path: Path, ids: tuple[str, ...]) -> None:
    lines: dict[str, int] = {}
    for number, value in enumerate(ids, 1):
        if lines.setdefault(value, number) != number:
            raise DataError(f"{path}:{number}: id {value!r} stands in line {lines[value]} already")


def load_arrays(path: Path) -> Arrays:
    """Read interactions.npz. Raises DataError if it is damaged or holds other arrays."""
    content = load_npz(path)
    missing = {"rows", "offsets", "train_stops", *SPLITS} - content.keys()
    if missing or not content.keys() <= Arrays.__annotations__.keys():
        raise DataError(f"{path}: holds other arrays than jgr prepare writes: {sorted(content)}")
    for name, array in content.items():
        shape = (4, *array.shape[1:2]) if name in SPLITS else array.shape[:1]
        wanted = np.int32 if name in ("rows", "actions", "scenarios") else np.int64
        if array.dtype != wanted or array.shape != shape or array.size == 0:
            raise DataError(f"{path}: {name} is {array.dtype} {array.shape}")
    return Arrays(**content)


DAMAGED = (
    ValueError, KeyError, EOFError, SyntaxError, tokenize.TokenError, NotImplementedError, zipfile.BadZipFile,
)  # fmt: skip
"""What numpy raises for files that are none of its own, or no longer."""


def load_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of an .npz file, none of Python objects. Raises DataError if the file is damaged."""
    with reading(path, DataError) as stream:
        try:
            with np.load(stream) as content:
                return {name: content[name] for name in content.files}
        except DAMAGED as cause:
            raise DataError(f"{path}: is damaged: {cause}") from None
