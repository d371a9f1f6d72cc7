# SPDX-License-Identifier: Apache-2.0
"""Rows that hold a list of items, as RecBole's sequential files do, as one row for each event.

A row of user and list is the user's events, oldest first. A row of user, list and item is a history and the item that
followed it; the histories of a user's rows must continue each other, over all files in the order train, valid, test, so
that each event is read once. Other lists of the same length, such as timestamp_list, belong to the events; what else
stands in such a row belongs to its item.
"""

from __future__ import annotations

from typing import Any

from jgr.data.sources.tables import BadCell, Block

LISTS = ("item_id_list", "item_seq", "item_list")
"""The names of a column that lists items."""
_TIMES = ("timestamp_list", "timestamp_seq")


class ItemLists:
    """Turns blocks of rows with lists into blocks of events; remembers what each user's rows told.

    left_out: columns of rows without an item of their own, which belong to no event.
    """

    def __init__(self) -> None:
        self._so_far: dict[Any, list[str]] = {}
        self.left_out: set[str] = set()

    def events(self, block: Block, column: str) -> tuple[Block, list[int]]:
        """The block's events, and the row of the file that each stands in. column: the one that lists items.

        Columns that are neither user, item nor time are kept for the events that the row's own item is.
        """
        columns = block.columns
        users, lists = columns["user_id"], [str(cell).split(" ") for cell in columns[column]]
        items: list[Any] | None = columns.get("item_id")
        stamped = next((name for name in _TIMES if name in columns), "")
        times = [str(cell).split(" ") for cell in columns[stamped]] if stamped else None
        last: list[Any] | None = columns.get("timestamp")
        others = {
            name: values
            for name, values in columns.items()
            if name not in ("user_id", "item_id", "timestamp", column, stamped)
        }
        if last is not None and times is None:
            self.left_out.add("timestamp")  # the list's items have none
        if items is None:
            self.left_out.update(others)
            others = {}
        elif "split" not in others:
            others["split"] = [None] * block.size
        out: dict[str, list[Any]] = {name: [] for name in ("user_id", "item_id", *others)}
        if times is not None:
            out["timestamp"] = []
        rows: list[int] = []
        for i, (user, listed) in enumerate(zip(users, lists, strict=True)):
            if not all(listed):
                raise BadCell(i, column, "expected items separated by single spaces")
            if times is not None and len(times[i]) != len(listed):
                raise BadCell(i, stamped, f"has {len(times[i])} times for {len(listed)} items")
            own = [] if items is None else [items[i]]
            known = self._so_far.get(user)
            if known is None:
                new = [*listed, *own]
            elif items is None:
                raise BadCell(i, "user_id", f"user {user!r} has a row already")
            elif known[-len(listed) :] != listed:
                raise BadCell(i, column, f"the history does not continue the earlier rows of user {user!r}")
            else:
                new = own
            self._so_far.setdefault(user, []).extend(new)
            out["user_id"] += [user] * len(new)
            out["item_id"] += new
            rows += [block.start + i] * len(new)
            if times is not None:
                when = times[i] if items is None else [*times[i], "" if last is None else last[i]]
                out["timestamp"] += when[-len(new) :]
            before = len(new) - len(own)
            for name, values in others.items():
                out[name] += [None] * before + [values[i]] * len(own)
            if items is not None and "split" in out:  # a history was learnt from, whatever its item is for
                out["split"][len(out["split"]) - len(new) : len(out["split"]) - len(own)] = ["train"] * before
        return Block(block.start, len(rows), out), rows
