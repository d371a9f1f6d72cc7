# SPDX-License-Identifier: Apache-2.0
"""Parts of a graph with few edges between them, balanced in several loads at once (RCLLM-7).

Two ways to a first partition: METIS through pymetis, where it is installed (the extra `placement`), and a multilevel
partition of our own, which is its method by NumPy: match neighbours by their heaviest edges until the graph is small,
part that by growing and by its eigenvectors, and refine at each level on the way back. METIS balances one load here,
since pymetis takes one number a vertex and ignores a second one without a word. So both are refined the same way after:
vertices move, and then change places, until all loads are within their bound.

Pure, but for what METIS draws, which is the same each time. n vertices, k parts, c loads.
"""

from __future__ import annotations

import heapq
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh
from scipy.sparse import csr_matrix
from scipy.spatial.distance import cdist

Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
By = Literal["auto", "metis", "numpy"]

IMBALANCE = 0.05
"""A part may have so much more than the mean part of each load."""
PASSES = 8
COARSE = 30
"""Vertices of the smallest graph, for each part."""
MOST_DENSE = 3000
"""The eigenvectors of larger graphs are not computed: the matrix is whole in memory, and the time goes as its cube."""
PAIRS = 96
"""So many vertices of two parts are compared to change places."""
EMPTIEST = 8
"""So many parts are asked to change one for one of a part that is too full."""


def partition(
    edges: Any, loads: Float64, parts: int, by: By = "auto", imbalance: float = IMBALANCE, seed: int = 0
) -> Int32:
    """The part of each vertex, [n] int32 in 0..parts-1.

    edges: scipy CSR [n, n], symmetric, not negative, without a diagonal. loads: [n, c], not negative. by: metis,
    numpy, or metis where it is installed. Where a vertex alone is heavier than a mean part, parts may have as much of
    that load as it has and the imbalance, if the other loads need it; these are less even where that is too little.
    ValueError where shapes do not fit; ModuleNotFoundError for metis where it is missing.
    """
    n = len(loads)
    if edges.shape != (n, n) or loads.ndim != 2 or parts < 1:
        raise ValueError(f"edges {edges.shape}, loads {loads.shape}, {parts} parts do not fit")
    if parts == 1 or not n:
        return np.zeros(n, np.int32)
    edges, relative = csr_matrix(edges), _relative(loads, parts)
    if by == "metis" or (by == "auto" and find_spec("pymetis") is not None):
        return refine(edges, relative, _metis(edges, relative, parts, imbalance), parts, imbalance)
    return _multilevel(edges, relative, parts, imbalance, np.random.default_rng(seed))


def cut(edges: Any, part: Int32) -> float:
    """The weight of the edges between parts, each counted once."""
    one, other = edges.nonzero()
    weights = np.asarray(edges[one, other]).ravel()
    return float(weights[part[one] != part[other]].sum() / 2)


def imbalance_of(loads: Float64, part: Int32, parts: int) -> Float64:
    """By how much the fullest part exceeds the mean one, of each load, [c]: 0.05 is 5 %. 0 for a load that is 0."""
    of = _sums(_relative(loads, parts), part, parts)
    return np.where(of.sum(0) > 0, of.max(0) - 1, 0.0)


def refine(edges: Any, loads: Float64, part: Int32, parts: int, imbalance: float = IMBALANCE) -> Int32:
    """A partition with a smaller cut, or with all loads within their bound where it had not been."""
    loads, part = _relative(loads, parts), part.astype(np.int32).copy()
    state = _State(csr_matrix(edges), loads, part, parts, 1 + imbalance)
    for _ in range(PASSES):
        balanced = state.balance()
        if not state.improve() and not balanced:
            break
    state.balance()
    if state.too_full():
        # The part of a vertex that is too heavy gives all others away, so that their loads have no room elsewhere.
        state.allow(loads.max(0) + imbalance)
        state.balance()
    return part


class _State:
    """A partition that is being refined, in place. most: of any load in a part; the mean part has 1."""

    def __init__(self, edges: Any, loads: Float64, part: Int32, parts: int, most: float) -> None:
        self._edges, self._loads, self._part, self._parts = edges, loads, part, parts
        self._most = np.full(loads.shape[1], most)  # [c]
        self._of = _sums(loads, part, parts)  # [k, c]

    def too_full(self) -> bool:
        """Whether a part has more than it may."""
        return bool((self._of - self._most > 1e-9).any())

    def allow(self, most: Float64) -> None:
        """Let parts have so much of each load, [c], where that is more than they may."""
        self._most = np.maximum(self._most, most)

    def improve(self) -> bool:
        """Move vertices to where their neighbours are, the largest gain first; whether any moved."""
        to_part = self._to_parts(np.arange(len(self._part)))
        own = to_part[np.arange(len(self._part)), self._part]
        to_part[np.arange(len(self._part)), self._part] = -np.inf
        gains = to_part.max(1) - own
        moved = 0
        for vertex in np.flatnonzero(gains > 1e-12)[np.argsort(-gains[gains > 1e-12], kind="stable")]:
            wants = self._to_part(vertex)
            here = self._part[vertex]
            gain = np.where(self._fits(vertex), wants - wants[here], -np.inf)
            gain[here] = 0.0
            there = int(gain.argmax())
            if gain[there] > 1e-12:
                self._move(vertex, there)
                moved += 1
        return moved > 0

    def balance(self) -> bool:
        """Move vertices out of parts that are too full, for as little as possible, and then exchange; whether any."""
        changed, stuck = False, set[int]()
        for _ in range(4 * self._parts):
            over = (self._of - self._most).max(1)
            over[list(stuck)] = (
                0.0  # one that a single vertex overfills; the others are balanced all the same
            )
            full = int(over.argmax())
            if over[full] <= 1e-9:
                break
            if self._shed(full) or self._exchange(full):
                changed = True
            else:
                stuck.add(full)
        return changed

    def _shed(self, full: int) -> bool:
        """Move vertices from a part that is too full to where they fit. Whether any moved."""
        load = int((self._of[full] - self._most).argmax())
        mine = np.flatnonzero((self._part == full) & (self._loads[:, load] > 0))
        wants = self._to_parts(mine)
        own = wants[:, full].copy()
        wants[:, full] = -np.inf
        price = (own - wants.max(1)) / self._loads[mine, load]
        moved = 0
        for vertex in mine[np.argsort(price, kind="stable")]:
            if self._of[full, load] <= self._most[load]:
                break
            fits = self._fits(vertex)
            fits[full] = False
            if fits.any():
                # Of parts that are worth the same, the emptiest.
                worth = np.where(fits, self._to_part(vertex), -np.inf)
                best = np.flatnonzero(worth == worth.max())
                self._move(vertex, int(best[self._of[best].max(1).argmin()]))
                moved += 1
        return moved > 0

    def _exchange(self, full: int) -> bool:
        """The exchange of two vertices, with an emptiest part, that takes the most from what exceeds the bounds.
        Whether there is one."""
        best, found = 1e-9, None
        mine = self._heaviest(full, int((self._of[full] - self._most).argmax()))
        for other in np.argsort(self._of.max(1), kind="stable")[:EMPTIEST]:
            if other == full:
                continue
            theirs = np.concatenate([self._heaviest(other, at) for at in range(self._loads.shape[1])])
            theirs = np.append(np.unique(np.concatenate([theirs, self._lightest(other)])), -1)
            less = self._less(full, mine, int(other), theirs)
            at = np.unravel_index(int(less.argmax()), less.shape)
            if less[at] > best:
                best, found = float(less[at]), (int(mine[at[0]]), int(theirs[at[1]]), int(other))
        if found is None:
            return False
        vertex, exchanged, other = found
        self._move(vertex, other)
        if exchanged >= 0:
            self._move(exchanged, full)
        return True

    def _less(
        self, full: int, mine: npt.NDArray[np.intp], other: int, theirs: npt.NDArray[np.intp]
    ) -> Float64:
        """What each exchange of one of mine, of a part, for one of another part's, -1: for none, takes from what
        exceeds the bounds, [mine, theirs]."""
        given, back = self._loads[mine], np.where(theirs[:, None] >= 0, self._loads[theirs], 0.0)
        here, there = np.zeros((len(mine), len(theirs))), np.zeros((len(mine), len(theirs)))
        for load, most in enumerate(self._most):  # by planes: an innermost axis of two is slow
            net = given[:, load, None] - back[:, load]
            here += np.maximum(self._of[full, load] - net - most, 0.0)
            there += np.maximum(self._of[other, load] + net - most, 0.0)
        found: Float64 = self._excess(self._of[full]) + self._excess(self._of[other]) - (here + there)
        return found

    def _heaviest(self, part: int, load: int) -> npt.NDArray[np.intp]:
        mine = np.flatnonzero(self._part == part)
        order = np.argsort(-self._loads[mine, load], kind="stable")
        # Evenly over all of them, so that a small excess finds a small vertex.
        some = np.unique(np.linspace(0, len(mine) - 1, min(PAIRS, len(mine))).astype(int))
        found: npt.NDArray[np.intp] = mine[order[some]]
        return found

    def _lightest(self, part: int) -> npt.NDArray[np.intp]:
        mine = np.flatnonzero(self._part == part)
        order: npt.NDArray[np.intp] = mine[np.argsort(self._loads[mine].max(1), kind="stable")]
        return order[:PAIRS]

    def _excess(self, of: Float64) -> Float64:
        found: Float64 = np.maximum(of - self._most, 0.0).sum(-1)
        return found

    def _fits(self, vertex: int) -> npt.NDArray[np.bool_]:
        """The parts that have room for a vertex, [k]."""
        fits: npt.NDArray[np.bool_] = (self._of + self._loads[vertex] <= self._most).all(1)
        return fits

    def _move(self, vertex: int, there: int) -> None:
        self._of[self._part[vertex]] -= self._loads[vertex]
        self._of[there] += self._loads[vertex]
        self._part[vertex] = there

    def _to_part(self, vertex: int) -> Float64:
        """The weight of a vertex's edges to each part, [k]."""
        ends = slice(self._edges.indptr[vertex], self._edges.indptr[vertex + 1])
        where = self._part[self._edges.indices[ends]]
        found: Float64 = np.bincount(where, self._edges.data[ends], self._parts).astype(np.float64)
        return found

    def _to_parts(self, vertices: npt.NDArray[np.intp]) -> Float64:
        """The weight of the edges of some vertices to each part, [m, k]."""
        n = len(self._part)
        member = csr_matrix((np.ones(n), (np.arange(n), self._part)), shape=(n, self._parts))
        found: Float64 = (self._edges[vertices] @ member).toarray()
        return found


def _metis(edges: Any, loads: Float64, parts: int, imbalance: float) -> Int32:
    import pymetis

    weights = np.maximum(1, np.rint(edges.data / edges.data.max() * 1000)) if edges.nnz else edges.data
    # One number for all loads: where their sum is even, each is nearly so.
    weight = np.rint(loads.sum(1) / max(loads.sum(1).max(), 1e-12) * 1000).astype(np.int64)
    options = pymetis.Options(ufactor=max(1, round(imbalance * 1000)), seed=1)
    found = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(edges.indptr.astype(np.int64), edges.indices.astype(np.int64)),
        vweights=weight,
        eweights=weights.astype(np.int64),
        recursive=False,
        options=options,
    )
    return np.asarray(found.vertex_part, np.int32)


def _multilevel(edges: Any, loads: Float64, parts: int, imbalance: float, rng: np.random.Generator) -> Int32:
    if len(loads) > COARSE * parts:
        into = _match(edges, loads, parts, rng)
        coarse = int(into.max()) + 1
        if coarse < 0.95 * len(loads):
            n = len(loads)
            gather = csr_matrix((np.ones(n), (into, np.arange(n))), shape=(coarse, n))
            small = (gather @ edges @ gather.T).tocsr()
            small.setdiag(0)
            small.eliminate_zeros()
            part = _multilevel(small, gather @ loads, parts, imbalance, rng)[into]
            return refine(edges, loads, part, parts, imbalance)
    if not edges.nnz:
        return refine(edges, loads, _deal(loads, parts), parts, imbalance)
    first = [_grow(edges, loads, parts, rng)]
    if parts < len(loads) <= MOST_DENSE:
        first.append(_embed(edges, parts, rng))
    refined = [refine(edges, loads, part, parts, imbalance) for part in first]
    return min(
        refined, key=lambda part: (max(imbalance, *imbalance_of(loads, part, parts)), cut(edges, part))
    )


def _match(edges: Any, loads: Float64, parts: int, rng: np.random.Generator) -> Int32:
    """The coarse vertex of each vertex, [n]: neighbours that prefer each other most become one, by the weight of their
    edge; none grows beyond a small share of a part."""
    n = len(loads)
    partner = np.full(n, -1, np.int64)
    rows = np.repeat(np.arange(n), np.diff(edges.indptr))
    columns, weight = edges.indices, edges.data
    light = ((loads[rows] + loads[columns]) <= 4.0 / COARSE).all(1)
    rows, columns, weight = rows[light], columns[light], weight[light]
    # Equal weights are told apart the same way from both ends, or nobody would be preferred by whom they prefer.
    drawn = rng.random(n)
    weight = weight * (1 + 1e-6 * (drawn[rows] + drawn[columns]))
    for _ in range(6):
        free = (partner[rows] < 0) & (partner[columns] < 0)
        rows, columns, weight = rows[free], columns[free], weight[free]
        if not len(rows):
            break
        order = np.lexsort((weight, rows))
        last = np.append(rows[order][1:] != rows[order][:-1], True)
        prefers = np.full(n, -1, np.int64)
        prefers[rows[order][last]] = columns[order][last]
        mutual = np.flatnonzero((prefers >= 0) & (prefers[prefers] == np.arange(n)))
        partner[mutual] = prefers[mutual]
    leader = np.where(partner >= 0, np.minimum(np.arange(n), partner), np.arange(n))
    return np.unique(leader, return_inverse=True)[1].astype(np.int32)


def _deal(loads: Float64, parts: int) -> Int32:
    """Vertices that nothing binds: each to the part that is the emptiest by then, the heaviest first."""
    part, size = np.zeros(len(loads), np.int32), loads.sum(1)
    emptiest = [(0.0, number) for number in range(parts)]
    for vertex in np.argsort(-size, kind="stable").tolist():
        full, number = emptiest[0]
        part[vertex] = number
        heapq.heapreplace(emptiest, (full + float(size[vertex]), number))
    return part


def _grow(edges: Any, loads: Float64, parts: int, rng: np.random.Generator) -> Int32:
    """Parts that grow one after the other by the vertex that is bound to them most, each to the mean load."""
    n, part = len(loads), np.full(len(loads), -1, np.int32)
    size, free = loads.sum(1), np.ones(n, bool)
    for number in range(parts - 1):
        if not free.any():
            break
        room = float(size[free].sum()) / (parts - number)
        bound = np.zeros(n)
        # From the one that the grown parts want least.
        taken = np.asarray(edges @ (~free).astype(np.float64)).ravel()
        chosen = int(np.flatnonzero(free)[np.argmin((taken + 1e-9 * rng.random(n))[free])])
        while True:
            part[chosen], free[chosen] = number, False
            room -= float(size[chosen])
            ends = slice(edges.indptr[chosen], edges.indptr[chosen + 1])
            bound[edges.indices[ends]] += edges.data[ends]
            if room <= 0 or not free.any():
                break
            chosen = int(np.where(free, bound, -1.0).argmax())
    part[part < 0] = parts - 1
    return part


def _embed(edges: Any, parts: int, rng: np.random.Generator) -> Int32:
    """Parts by the graph's last eigenvectors: vertices that many paths join lie near each other there, and k-means
    finds their groups (Ng, Jordan, Weiss). The groups are as large as they are: refining balances them."""
    n = edges.shape[0]
    degree = np.asarray(edges.sum(1)).ravel()
    scale = 1 / np.sqrt(np.where(degree > 0, degree, 1.0))
    normal = scale[:, None] * edges.toarray() * scale
    vectors = eigh(normal, subset_by_index=(n - parts, n - 1))[1]
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    centres = vectors[[int(rng.integers(n))]]
    while len(centres) < parts:  # each as far from all others as one can be
        centres = np.append(centres, vectors[[int(cdist(vectors, centres).min(1).argmax())]], axis=0)
    for _ in range(PASSES):
        part: Int32 = cdist(vectors, centres).argmin(1).astype(np.int32)
        mine = part[:, None] == np.arange(parts)  # [n, k]
        sizes = mine.sum(0)
        centres = np.where(sizes[:, None] > 0, (mine.T @ vectors) / np.maximum(1, sizes)[:, None], centres)
    return part


def _relative(loads: Float64, parts: int) -> Float64:
    """The loads, [n, c], in units of the mean part's."""
    total = loads.sum(0) / parts
    found: Float64 = loads / np.where(total > 0, total, 1.0)
    return found


def _sums(loads: Float64, part: Int32, parts: int) -> Float64:
    return np.stack([np.bincount(part, load, parts) for load in loads.T], axis=1)
