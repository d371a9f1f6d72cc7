# SPDX-License-Identifier: Apache-2.0
"""The free list of the page pool: which cells are taken by whom (DESIGN idea 3, BAT-6).

The pool is one array of pages of one size in bytes, which say nothing of what stands in them. A page is empty or
belongs to one class: it is then a slab of as many cells of the class's size as fit. Small cells share a page, and a
large one has a page to itself. All classes take their pages from one free list, and a class's limit is a number:
moving the boundary between classes moves no page. Classes come and go with the models that need them.

Pure bookkeeping: no array of the pool is seen here. Cell i of page p is number p * (cells of a page) + i, as the class
counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

GOOD_FIT = 0.85
MOST_PIECES = 64


class Room(NamedTuple):
    """What an entry of a class takes: cells of `bytes` each, at most a page's.

    cells: their number for each `step` of the entry's length, rounded up. step 0: their number, for any length.
    """

    bytes: int
    cells: int = 1
    step: int = 0

    def of(self, length: int) -> int:
        """The number of cells that an entry of this length takes."""
        return self.cells * (-(-length // self.step) if self.step else 1)

    def filled(self, length: int) -> float:
        """The bytes of its cells that an entry of this length uses."""
        return self.bytes * self.cells * (length / self.step if self.step else length > 0)


def pieces(grains: int, grain_bytes: int, page_bytes: int) -> tuple[int, int]:
    """Into how many cells something of equal grains, each at most a page, is cut, and the grains of a cell.

    The fewest cells that fill their pages to GOOD_FIT; where none do, those that fill them best.
    """
    if grain_bytes > page_bytes:
        raise ValueError(f"a page of {page_bytes} bytes does not hold {grain_bytes}")
    best, best_fit = (grains, 1), 0.0
    for count in range(1, min(grains, MOST_PIECES + grains * grain_bytes // page_bytes) + 1):
        each = -(-grains // count)
        if each * grain_bytes > page_bytes:
            continue
        fit = page_bytes // (each * grain_bytes) * grains * grain_bytes / (count * page_bytes)
        if fit > best_fit:
            best, best_fit = (-(-grains // each), each), fit
        if fit >= GOOD_FIT:
            break
    return best


@dataclass
class _Class:
    """One class's cells. cells: in a page. limit: pages that the class may hold.

    holes: free cells of its partly used pages, by page. used: number of used cells, by page.
    """

    cells: int
    limit: int
    used: dict[int, int] = field(default_factory=dict)
    holes: dict[int, list[int]] = field(default_factory=dict)


class Pages:
    """The free list of a pool of `count` pages of `page_bytes`.

    There is no lock: one thread, the event loop's, gives pages out and takes them back. Classes may be added, and those
    that never held a page limited and removed, by the threads that load models.
    """

    def __init__(self, count: int, page_bytes: int) -> None:
        if count < 0 or page_bytes < 1:
            raise ValueError(f"a pool of {count} pages of {page_bytes} bytes")
        self.count, self.page_bytes = count, page_bytes
        self._free = list(range(count - 1, -1, -1))
        self._classes: dict[str, _Class] = {}

    def add(self, name: str, cell_bytes: int) -> None:
        """A class of cells of this size, which may at first hold every page. ValueError where there is one already."""
        if name in self._classes or not 0 < cell_bytes <= self.page_bytes:
            raise ValueError(f"class {name} of {cell_bytes} bytes, in pages of {self.page_bytes}")
        self._classes[name] = _Class(self.page_bytes // cell_bytes, self.count)

    def remove(self, name: str) -> None:
        """Forget a class. ValueError where it still holds a page."""
        if self._classes[name].used:
            raise ValueError(f"class {name} holds pages")
        del self._classes[name]

    @property
    def free(self) -> int:
        """Pages of no class."""
        return len(self._free)

    def cells(self, name: str) -> int:
        """Cells of a page of this class."""
        return self._classes[name].cells

    def used(self, name: str) -> int:
        """Pages that a class holds; 0 where there is none of that name."""
        return len(self._classes[name].used) if name in self._classes else 0

    def cells_used(self, name: str) -> int:
        """Cells that its entries hold; 0 where there is none of that name."""
        return sum(self._classes[name].used.values()) if name in self._classes else 0

    def limit(self, name: str) -> int:
        return self._classes[name].limit

    def set_limit(self, name: str, pages: int) -> None:
        """How many pages a class may hold. One that holds more keeps them, and is given none until it freed some."""
        if not 0 <= pages <= self.count:
            raise ValueError(f"{pages} pages of {self.count}")
        self._classes[name].limit = pages

    def room(self, name: str) -> int:
        """Cells that `take` can give to a class now."""
        of = self._classes[name]
        pages = max(0, min(len(self._free), of.limit - len(of.used)))
        return pages * of.cells + sum(len(holes) for holes in of.holes.values())

    def take(self, name: str, cells: int) -> tuple[int, ...] | None:
        """The numbers of so many cells; None where there is no room for all of them."""
        if cells > self.room(name):
            return None
        of = self._classes[name]
        taken: list[int] = []
        while len(taken) < cells:
            if not of.holes:
                page = self._free.pop()
                of.holes[page] = list(range((page + 1) * of.cells - 1, page * of.cells - 1, -1))
                of.used[page] = 0
            page, holes = next(iter(of.holes.items()))
            while holes and len(taken) < cells:
                taken.append(holes.pop())
                of.used[page] += 1
            if not holes:
                del of.holes[page]
        return tuple(taken)

    def take_pages(self, name: str, count: int) -> list[int]:
        """At most so many pages, for a class whose cells are whole pages: those that are free and below its limit."""
        of = self._classes[name]
        count = max(0, min(count, len(self._free), of.limit - len(of.used)))
        at = len(self._free) - count
        taken = self._free[at:]
        del self._free[at:]
        of.used.update(dict.fromkeys(taken, 1))
        return taken

    def give_pages(self, name: str, pages: list[int]) -> None:
        """Pages of `take_pages` are of no class again. ValueError: not in use."""
        used = self._classes[name].used
        if len(set(pages)) != len(pages) or not used.keys() >= set(pages):
            raise ValueError(f"pages are not in use by {name}")
        for page in pages:
            del used[page]
        self._free += pages

    def give_back(self, name: str, cells: tuple[int, ...]) -> None:
        """Cells of one or more `take`; a page without a used cell is of no class again. ValueError: not in use."""
        of = self._classes[name]
        for cell in cells:
            page = cell // of.cells
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
                assert all(cell // of.cells == page for cell in holes), f"{name}: a hole of another page"
                assert 0 < used == of.cells - len(holes), f"{name}: page {page} has lost a cell"
