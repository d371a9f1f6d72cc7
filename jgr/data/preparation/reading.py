# SPDX-License-Identifier: Apache-2.0
"""The first stage of `jgr prepare`: the raw files, read once, as arrays of numbers and lists of ids in a work folder.

Sources that know lines give an event for each (`Raw`), those that know tables give columns (`Tabular`). Errors in a
line are reported here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jgr.data.interactions import DataError
from jgr.data.preparation.splitting import Events
from jgr.data.prepared import ITEMS, MAX_ID_CHARS, USERS, load_npz, read_ids, read_items
from jgr.data.sources.records import EventColumns, Raw, TableOptions, Tabular
from jgr.fields import CONTROL_CHARACTER
from jgr.files import MAX_LINE_BYTES, read_whole, writing

EVENTS, FACTS = "events.npz", "facts.json"
_ENCODER = msgspec.json.Encoder(order="deterministic")


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the arrays do not tell: the names of actions and scenarios, the unit of times, and notes for people."""

    actions: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    time_unit: str = ""
    notes: tuple[str, ...] = ()


def read(raw: Raw | Tabular, work: Path, actions: tuple[str, ...], options: TableOptions) -> None:
    """Read all files and write EVENTS, USERS, ITEMS and FACTS. actions: those of a source of lines.

    Raises DataError, naming file and line.
    """
    found = raw.read(options) if isinstance(raw, Tabular) else _from_lines(raw, actions)

    def place(index: int) -> tuple[Path, int]:
        return found.place(_first(found.item, index))

    for index, item_id in enumerate(found.item_ids):
        if CONTROL_CHARACTER.search(item_id):
            path, number = place(index)
            raise DataError(
                f"{path}:{number}: item_id: no control characters may be in it, found {item_id!r}"
            )
    lines, unused = _read_items(raw, found.item_ids, place)
    columns: dict[str, Any] = {
        "user": np.asarray(found.user, np.int32),
        "item": np.asarray(found.item, np.int32),
        "time": np.zeros(0, np.int64) if found.time is None else found.time,
        "split": np.asarray(found.split, np.int8),
    }
    if found.actions is not None and found.scenario is not None:
        columns |= {"actions": found.actions, "scenario": found.scenario}
    with writing(work / EVENTS, DataError) as stream:
        np.savez(stream, **columns)
    write_lines(work / USERS, map(_ENCODER.encode, found.user_ids))
    write_lines(work / ITEMS, lines)
    notes = list(found.notes)
    if unused and raw.items:
        notes.append(f"{raw.items[0].name}: left out, {unused} items: they have no event")
    facts = Facts(found.action_names, found.scenario_names, found.time_unit, tuple(notes))
    with writing(work / FACTS, DataError) as stream:
        stream.write(_ENCODER.encode(facts))


def load(work: Path) -> tuple[Events, Facts]:
    """Read what `read` wrote."""
    columns = {name: values.astype(np.int64) for name, values in load_npz(work / EVENTS).items()}
    item_ids, metadata = read_items(work / ITEMS)
    lines = list(map(item_line, item_ids, metadata))
    time = columns["time"] if len(columns["time"]) else None
    ids = read_ids(work / USERS)
    given = (columns.get("actions"), columns.get("scenario"))
    events = Events(columns["user"], columns["item"], time, columns["split"], ids, item_ids, lines, *given)
    try:
        return events, msgspec.json.decode(read_whole(work / FACTS, DataError), type=Facts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise DataError(f"{work / FACTS}: {cause}; remove {work}") from None


def _first(items: Any, index: int) -> int:
    return int(np.argmax(np.asarray(items) == index))


def _from_lines(raw: Raw, names: tuple[str, ...]) -> EventColumns:
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    user, item, time, split = array("i"), array("i"), array("q"), array("b")
    actions, scenario = array("i"), array("i")
    starts: list[tuple[int, Path]] = []
    numbers = array("q")
    for path, read_events in raw.events:
        starts.append((len(user), path))
        for number, event in read_events(path):
            for event_id in (event.user_id, event.item_id):
                if not 0 < len(event_id) <= MAX_ID_CHARS:
                    raise DataError(f"{path}:{number}: an id has 1 to {MAX_ID_CHARS} characters")
            user.append(users.setdefault(event.user_id, len(users)))
            item.append(items.setdefault(event.item_id, len(items)))
            numbers.append(number)
            split.append(event.split)
            if names:
                actions.append(event.actions)
                scenario.append(event.scenario)
            if event.time is not None:
                time.append(event.time)
            # Checked while reading, so that the message can name the line.
            if len(time) not in (0, len(user)):
                raise DataError(f"{path}:{number}: some events have a time and some have none")
    if not user:
        raise DataError(f"{raw.events[0][0]}: the file holds no events")

    def place(event: int) -> tuple[Path, int]:
        return next(path for start, path in reversed(starts) if start <= event), numbers[event]

    return EventColumns(
        user=np.array(user),
        item=np.array(item),
        user_ids=list(users),
        item_ids=list(items),
        time=np.array(time) if time else None,
        split=np.array(split),
        place=place,
        actions=np.array(actions, np.int32) if names else None,
        scenario=np.array(scenario, np.int32) if names else None,
        action_names=names,
    )


def _read_items(
    raw: Raw | Tabular, item_ids: list[str], place: Callable[[int], tuple[Path, int]]
) -> tuple[list[bytes], int]:
    """The line of every item that has an event, and how many items have none. Those are checked and left out.

    place: where an item's first event stands.
    """
    if raw.items is None:
        return [item_line(item_id, {}) for item_id in item_ids], 0
    path, read_all = raw.items
    items = {item_id: index for index, item_id in enumerate(item_ids)}
    lines: list[bytes | None] = [None] * len(items)
    described: dict[str, int] = {}
    for number, item in read_all(path):
        if described.setdefault(item.item_id, number) != number:
            raise DataError(
                f"{path}:{number}: item {item.item_id!r} is described in line {described[item.item_id]} already"
            )
        index = items.get(item.item_id)
        if index is None:
            continue
        try:
            lines[index] = item_line(item.item_id, item.metadata)
        except ValueError as cause:
            raise DataError(f"{path}:{number}: {cause}") from None
    found = [line for line in lines if line is not None]
    if len(found) < len(lines):
        index = lines.index(None)
        at, number = place(index)
        raise DataError(f"{at}:{number}: item {item_ids[index]!r} is not in {path.name}")
    return found, len(described) - len(found)


def item_line(item_id: str, metadata: dict[str, Any]) -> bytes:
    """Encode the item as a line of JSON, keys sorted. Raises ValueError unless reading it back gives the same."""
    try:
        line = _ENCODER.encode({"item_id": item_id, "metadata": metadata})
        faithful = msgspec.json.decode(line)["metadata"] == metadata
    except (TypeError, ValueError, RecursionError) as cause:
        raise ValueError(f"metadata cannot be written as JSON: {cause}") from None
    if not faithful:
        raise ValueError("metadata must be plain, finite JSON values")
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"id and metadata take more than {MAX_LINE_BYTES} bytes")
    return line


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines of JSON as a whole or not at all."""
    with writing(path, DataError) as stream:
        stream.writelines(line + b"\n" for line in lines)
