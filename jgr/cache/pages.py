# SPDX-License-Identifier: Apache-2.0
"""Which cells of the page pool are free (DESIGN idea 3, BAT-6).

The pool is one array of pages, each of `cells` cells of one size. A page is empty or belongs to one class: a class that
splits gives out single cells, so that short entries share pages, the others whole pages. All classes take their pages
from one free list, and a class's limit is a number: moving the boundary between classes moves no page.

Pure bookkeeping: no array of the pool is seen here. Cell c of page p is number p * cells + c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass
class _Class:
    """limit: pages that it may hold. holes: free cells of its partly used pages, by page; used: cells of each page."""

    splits: bool
    limit: int
    used: dict[int, int] = field(default_factory=dict)
    holes: dict[int, list[int]] = field(default_factory=dict)


class Pages:
    """The free list of a pool of `count` pages of `cells` cells.

    splits: each class of entries, and whether its pages are shared cell by cell. A class may at first hold every page.
    """

    def __init__(self, count: int, cells: int, splits: Mapping[str, bool]) -> None:
        if count < 0 or cells < 1:
            raise ValueError(f"a pool of {count} pages of {cells} cells")
        self.count, self.cells = count, cells
        self._free = list(range(count - 1, -1, -1))
        self._classes = {name: _Class(split, count) for name, split in splits.items()}

    @property
    def free(self) -> int:
        """Pages of no class."""
        return len(self._free)

    def used(self, name: str) -> int:
        """Pages that a class holds."""
        return len(self._classes[name].used)

    def cells_used(self, name: str) -> int:
        """Cells that its entries hold; whole pages count with all their cells."""
        return sum(self._classes[name].used.values())

    def limit(self, name: str) -> int:
        return self._classes[name].limit

    def set_limit(self, name: str, pages: int) -> None:
        """How many pages a class may hold. One that holds more keeps them, and is given none until it freed some."""
        if not 0 <= pages <= self.count:
            raise ValueError(f"{pages} pages of {self.count}")
        self._classes[name].limit = pages

    def size(self, name: str, cells: int) -> int:
        """Cells that an entry of so many cells takes: where pages are not shared, all cells of its pages."""
        return cells if self._classes[name].splits else -(-cells // self.cells) * self.cells

    def room(self, name: str) -> int:
        """Cells that `take` can give to a class now."""
        of = self._classes[name]
        pages = max(0, min(len(self._free), of.limit - len(of.used)))
        return pages * self.cells + sum(len(holes) for holes in of.holes.values())

    def take(self, name: str, cells: int) -> Int32 | None:
        """[size(name, cells)] int32 cell numbers; None where there is no room for all of them."""
        size = self.size(name, cells)
        if size > self.room(name):
            return None
        of = self._classes[name]
        if not of.splits:
            pages = [self._free.pop() for _ in range(size // self.cells)]
            of.used.update(dict.fromkeys(pages, self.cells))
            first = np.array(pages, np.int32) * np.int32(self.cells)
            every: Int32 = np.add.outer(first, np.arange(self.cells, dtype=np.int32)).ravel()
            return every
        taken: list[int] = []
        while len(taken) < size:
            if not of.holes:
                page = self._free.pop()
                of.holes[page] = list(range((page + 1) * self.cells - 1, page * self.cells - 1, -1))
                of.used[page] = 0
            page, holes = next(iter(of.holes.items()))
            while holes and len(taken) < size:
                taken.append(holes.pop())
                of.used[page] += 1
            if not holes:
                del of.holes[page]
        return np.array(taken, np.int32)

    def give_back(self, name: str, cells: Int32) -> None:
        """All cells of one or more `take`; a page without an entry is of no class again. ValueError: not in use."""
        of = self._classes[name]
        if not of.splits:
            pages = (cells[:: self.cells] // self.cells).tolist()
            if len(cells) % self.cells or any(page not in of.used for page in pages):
                raise ValueError(f"cells {cells} are not pages in use by {name}")
            for page in pages:
                del of.used[page]
            self._free += pages
            return
        for cell in cells.tolist():
            page = cell // self.cells
            holes = of.holes.setdefault(page, []) if page in of.used else None
            if holes is None or cell in holes:
                raise ValueError(f"cell {cell} is not in use by {name}")
            holes.append(cell)
            of.used[page] -= 1
            if of.used[page] == 0:
                del of.used[page], of.holes[page]
                self._free.append(page)

    def check(self) -> None:
        """Audit: every page is free or of one class, every cell of a class's page used or a hole. AssertionError."""
        held = [page for of in self._classes.values() for page in of.used]
        assert sorted([*self._free, *held]) == list(range(self.count)), (
            "free and used pages are not all pages"
        )
        for name, of in self._classes.items():
            assert set(of.holes) <= set(of.used), f"{name}: holes in a page that is not its own"
            for page, used in of.used.items():
                holes = of.holes.get(page, [])
                assert len(set(holes)) == len(holes), f"{name}: a cell is free twice"
                assert all(cell // self.cells == page for cell in holes), f"{name}: a hole of another page"
                assert 0 < used == self.cells - len(holes), f"{name}: page {page} has lost a cell"
                assert of.splits or not holes, f"{name}: page {page} is shared"
