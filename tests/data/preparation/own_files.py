# SPDX-License-Identifier: Apache-2.0
"""One small log in every form that `--source=generic` takes, and what it must become, by plain Python."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

FORMS = ("csv", "tsv", "jsonl", "parquet", "inter")
COLUMNS = ("user_id", "item_id", "timestamp", "click", "rating", "event", "scenario", "note")
START = 1_700_000_000


class Row(NamedTuple):
    """An event. rating: None where there is none."""

    user: str
    item: str
    time: int
    click: int
    rating: int | None
    event: str
    scenario: str
    note: str


def log(users: int = 24, events: int = 14, items: int = 12) -> list[Row]:
    """Shuffled events: users click the items of their parity, and rate those higher."""
    draw = random.Random(3)
    rows = []
    for user in range(users):
        for step in range(events):
            item = draw.randrange(items)
            likes = item % 2 == user % 2
            rating = draw.randint(4, 5) if likes else draw.randint(1, 3)
            rows.append(
                Row(
                    f"u{user}", f"i{item}", START + 90_000 * step + user, int(likes),
                    None if draw.random() < 0.1 else rating, draw.choice(["view", "cart", "buy now"]),
                    draw.choice(["home", "search"]), f"note, {user} {step}",
                )
            )  # fmt: skip
    draw.shuffle(rows)
    return rows


def write(
    folder: Path, form: str, rows: Sequence[Row], stamp: Callable[[int], Any] = lambda time: time
) -> Path:
    """Write the log and its items in a form. stamp: a time as the file has it."""
    folder.mkdir(parents=True, exist_ok=True)
    items = sorted({row.item for row in rows})
    table = [[*row[:2], stamp(row.time), *row[3:]] for row in rows]
    if form in ("csv", "tsv"):
        for name, header, lines in (
            ("interactions", COLUMNS, table),
            ("items", ("item_id", "title"), [[i, f"Item {i}"] for i in items]),
        ):
            with open(folder / f"{name}.{form}", "w", newline="") as file:
                csv.writer(file, delimiter="," if form == "csv" else "\t").writerows([header, *lines])
    elif form == "jsonl":
        _lines(folder / "interactions.jsonl", [dict(zip(COLUMNS, row, strict=True)) for row in table])
        _lines(folder / "items.jsonl", [{"item_id": i, "title": f"Item {i}"} for i in items])
    elif form == "parquet":
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        columns = {name: [row[at] for row in table] for at, name in enumerate(COLUMNS)}
        parquet.write_table(arrow.table(columns), folder / "interactions.parquet", row_group_size=100)
        titles = [f"Item {i}" for i in items]
        parquet.write_table(arrow.table({"item_id": items, "title": titles}), folder / "items.parquet")
    else:
        types = ("token", "token", "float", "float", "float", "token", "token", "token")
        header = "\t".join(f"{name}:{type_}" for name, type_ in zip(COLUMNS, types, strict=True))
        body = ["\t".join("" if cell is None else str(cell) for cell in row) for row in table]
        (folder / "mine.inter").write_text("\n".join([header, *body]) + "\n")
        lines = ["item_id:token\ttitle:token", *(f"{i}\tItem {i}" for i in items)]
        (folder / "mine.item").write_text("\n".join(lines) + "\n")
    return folder


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def iso(time: int) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def actions_of(row: Row) -> set[str]:
    """The names of what a row's user did, by the rules that docs/training.md gives."""
    done = {f"event_{row.event.replace(' ', '_')}"}
    if row.click:
        done.add("click")
    return done | {f"rating_from_{least}" for least in (2, 3, 4, 5) if (row.rating or 0) >= least}


def by_user(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Each user's events, oldest first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.time):
        found.setdefault(row.user, []).append(row)
    return found
