# SPDX-License-Identifier: Apache-2.0
"""Semantic ids: item vectors become short tuples of codes, so that similar items share a prefix.

The one idea: each level codes the residual that the levels before it left. A level's codebook is a k-means of the
residuals r; an item's code is its nearest codeword, which is then subtracted from r. So at any time

    point = sum of the codewords so far + residual

and all later steps (collision policies, report) need only points, codebooks and codes, whether the points are
vectors under residual k-means or latents of an RQ-VAE.

It is written in numpy, not for the device: ids are made once per catalog, most of the time goes into one float32
matmul per iteration that BLAS does well, and the balanced assignment and k-means++ are sequential by nature.

- Equal inputs and seeds give equal ids on one machine; another BLAS may decide near ties differently.
- Distances are computed in blocks: never more than BLOCK of them are held at once.

Letters: n points, e dimensions, K codewords, depth levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import logsumexp

from jgr.catalog.catalog import MAX_DEPTH, Catalog
from jgr.config import UserError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Progress = Callable[[int, int, str], None]

BLOCK = 1 << 22
MAX_SIZE = 1 << 16
POLICIES = ("share", "extra", "reassign", "item")
_MAX_PLAN = 1 << 24
_SAMPLE_PER_CODE = 8
_SAMPLE_MIN = 4096
_EPSILON = 0.05
_SINKHORN_ITERATIONS = 100
_BINS = (1, 2, 3, 4, 5, 10, 50)


class SemanticIdError(UserError):
    """Sizes, vectors or a policy from which no semantic ids can be made; the message says what to change."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """Points and their codes.

    points: [n, e] float32. codebooks: for each level [K, e] float32. codes: [n, depth] int32.
    """

    points: Float32
    codebooks: tuple[Float32, ...]
    codes: Int32

    def residual(self, levels: int) -> Float32:
        """Each point minus its codewords of the first `levels` levels, [n, e] float32."""
        left = self.points
        for codebook, codes in zip(self.codebooks[:levels], self.codes.T, strict=False):
            left = left - codebook[codes]
        return left

    @property
    def error(self) -> float:
        """Squared error as a share of the points' variance: 0 is exact, 1 is no better than their mean."""
        variance = float(np.square(self.points - self.points.mean(axis=0)).sum(dtype=np.float64))
        left = float(np.square(self.residual(len(self.codebooks))).sum(dtype=np.float64))
        return left / variance if variance else 0.0


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise SemanticIdError unless there are 1 to MAX_DEPTH sizes of 1 to MAX_SIZE codes."""
    if not 1 <= len(sizes) <= MAX_DEPTH:
        raise SemanticIdError(f"sizes: needs 1 to {MAX_DEPTH} levels, found {len(sizes)}")
    for size in sizes:
        if not 1 <= size <= MAX_SIZE:
            raise SemanticIdError(f"sizes: a level has 1 to {MAX_SIZE} codes, not {size}")


def residual_kmeans(
    points: Float32,
    sizes: Sequence[int],
    *,
    seed: int,
    balanced: bool = False,
    iterations: int = 20,
    progress: Progress = lambda done, total, status: None,
) -> Quantized:
    """Quantise points by a k-means of the residuals at each level. progress(levels done, levels, status) after each.

    points: [n, e], n >= 1, finite. sizes: codes of each level. balanced: a code is given to at most ceil(n / K) points.
    """
    check_sizes(sizes)
    residual = points = np.asarray(points, np.float32)
    codebooks, columns = [], []
    for level, size in enumerate(sizes):
        rng = np.random.default_rng((seed, level))
        codebook, codes = kmeans(residual, size, rng, balanced=balanced, iterations=iterations)
        codebooks.append(codebook)
        columns.append(codes)
        residual = residual - codebook[codes]
        progress(level + 1, len(sizes), f"level {level}")
    return Quantized(points, tuple(codebooks), np.stack(columns, axis=1))


def quantize(points: Float32, codebooks: Sequence[Float32]) -> Quantized:
    """Code points by given codebooks: the nearest codeword at each level."""
    residual, columns = points, []
    for codebook in codebooks:
        codes = nearest(residual, codebook)
        columns.append(codes)
        residual = residual - codebook[codes]
    return Quantized(points, tuple(codebooks), np.stack(columns, axis=1))


def kmeans(
    points: Float32,
    size: int,
    rng: np.random.Generator,
    *,
    balanced: bool = False,
    iterations: int = 20,
) -> tuple[Float32, Int32]:
    """A codebook [size, e] and each point's code [n] in it.

    Lloyd's iteration from a k-means++ start, until nothing changes or `iterations` are done. A codeword that
    no point took moves to one of the points farthest from their own codewords. With fewer distinct points than `size`
    some codewords stay unused.
    """
    assign = nearest_balanced if balanced else nearest
    codebook = _plus_plus(points, size, rng)
    codes = assign(points, codebook)
    for _ in range(iterations):
        codebook = _means(points, codes, codebook)
        before, codes = codes, assign(points, codebook)
        if np.array_equal(before, codes):
            break
    return codebook, codes


def nearest(points: Float32, codebook: Float32, allowed: Bool | None = None) -> Int32:
    """The code of each point's nearest codeword, [n] int32; of equally near ones the smallest code.

    allowed: [K] bool, the codes to choose from; None: all.
    """
    # Half of |x - c|^2, without |x|^2, which is the same for every c.
    half = 0.5 * np.square(codebook).sum(axis=1)
    if allowed is not None:
        half = np.where(allowed, half, np.float32(np.inf))
    codes = np.empty(len(points), np.int32)
    step = max(1, BLOCK // len(codebook))
    for at in range(0, len(points), step):
        codes[at : at + step] = np.argmin(half - points[at : at + step] @ codebook.T, axis=1)
    return codes


def nearest_balanced(points: Float32, codebook: Float32) -> Int32:
    """Give points codes, [n] int32, so that no code is given to more than ceil(n / K) points.

    Points choose one after the other, the one nearest to any codeword first. Each takes its nearest codeword that
    still has room.
    """
    capacity = -(-len(points) // len(codebook))

    def choose(rows: Int64, allowed: Bool) -> tuple[Int32, Float32]:
        codes = nearest(points[rows], codebook, allowed)
        return codes, _squared(points[rows], codebook[codes])

    return _in_turn(len(points), np.full(len(codebook), capacity), choose)


def _in_turn(
    n: int,
    room: Int64,
    choose: Callable[[Int64, Bool], tuple[Int32, npt.NDArray[np.floating[Any]]]],
) -> Int32:
    """Give each of n points a code, in order of the cost of its first choice, as long as there is room.

    room: [K], adds up to at least n. choose(rows, allowed): the best allowed code of each row, and its cost.
    """
    codes = np.empty(n, np.int32)
    choice, cost = choose(np.arange(n), room > 0)
    waiting = np.argsort(cost, kind="stable")
    choice = choice[waiting]
    # Choices only change when a code fills up. So each round serves all points before the first one whose code is
    # full: at most K + 1 rounds, with the same codes as one by one.
    while len(waiting):
        late = _rank(choice) >= room[choice]
        fit = int(np.argmax(late)) if late.any() else n
        codes[waiting[:fit]] = choice[:fit]
        room = room - np.bincount(choice[:fit], minlength=len(room))
        waiting, choice = waiting[fit:], choice[fit:]
        lost = room[choice] == 0
        if lost.any():
            choice[lost] = choose(waiting[lost], room > 0)[0]
    return codes


def _rank(groups: npt.NDArray[np.integer[Any]]) -> Int64:
    """For each element, how many earlier elements are equal to it, [n]."""
    if groups.max(initial=0) < MAX_SIZE:
        groups = groups.astype(np.uint16)  # numpy sorts these in linear time
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank


def _plus_plus(points: Float32, size: int, rng: np.random.Generator) -> Float32:
    """k-means++ on a sample: each codeword is a point drawn by its squared distance to those before it."""
    wanted = min(len(points), max(_SAMPLE_MIN, _SAMPLE_PER_CODE * size))
    sample = points[np.sort(rng.choice(len(points), wanted, replace=False))]
    chosen = [int(rng.integers(wanted))]
    weight = _squared(sample, sample[chosen[0]])
    while len(chosen) < size:
        running = np.cumsum(weight, dtype=np.float64)
        # If all points are codewords already, u is 0 and the last point is taken once more.
        u = rng.random() * running[-1]
        chosen.append(min(int(np.searchsorted(running, u, side="right")), wanted - 1))
        weight = np.minimum(weight, _squared(sample, sample[chosen[-1]]))
    return sample[chosen]


def _means(points: Float32, codes: Int32, codebook: Float32) -> Float32:
    """The mean of each code's points; unused codes move to the points farthest from their mean."""
    order = np.argsort(codes, kind="stable")
    used, starts, counts = np.unique(codes[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(points[order], starts, axis=0, dtype=np.float64)
    moved = codebook.copy()
    moved[used] = sums / counts[:, None]
    unused = np.setdiff1d(np.arange(len(codebook)), used)
    if len(unused):
        distance = _squared(points, moved[codes])
        farthest = np.argsort(-distance, kind="stable")[: len(unused)]
        farthest = farthest[distance[farthest] > 0]
        moved[unused[: len(farthest)]] = points[farthest]
    return moved


def _squared(a: Float32, b: Float32) -> Float32:
    """The squared distance of each row of a to the same row of b, or to the single row b, [n]."""
    difference = a - b
    squared: Float32 = np.einsum("ne,ne->n", difference, difference)
    return squared


def resolve_collisions(quantized: Quantized, policy: str) -> Int32:
    """Apply a policy for items with the same id; returns codes [n, depth] int32, or [n, depth + 1] with the policies
    "extra" and "item".

    share: they keep it; the catalog returns all items of an id, in its own order.
    extra: one more level numbers the items of each id in row order, so that no two items share an id.
    item: one more level names the item itself, so that a model can learn of it what holds for no other.
    reassign: colliding items are given other codes at the last level, see `reassign`.
    """
    if policy == "share":
        return quantized.codes
    if policy == "extra":
        return number_duplicates(quantized.codes)
    if policy == "item":
        return own_level(quantized.codes)
    if policy == "reassign":
        return reassign(quantized)
    raise SemanticIdError(f"collisions must be one of {', '.join(POLICIES)}, not {policy!r}")


def number_duplicates(codes: Int32) -> Int32:
    """Add a level to the codes: 0 for the first item of an id in row order, 1 for the second, and so on."""
    return _one_more_level(codes, _rank(_groups(codes)).astype(np.int32))


def own_level(codes: Int32) -> Int32:
    """Add a level to the codes that is each item's row."""
    return _one_more_level(codes, np.arange(len(codes), dtype=np.int32))


def _one_more_level(codes: Int32, last: Int32) -> Int32:
    """The codes [n, depth] with a further level, [n, depth + 1]. Raises SemanticIdError if that is one too many."""
    if codes.shape[1] == MAX_DEPTH:
        raise SemanticIdError(f"collisions: an extra level would make more than {MAX_DEPTH}")
    return np.concatenate([codes, last[:, None]], axis=1)


def reassign(quantized: Quantized) -> Int32:
    """Spread items of the same id over the last level's free codes, by optimal transport.

    Let m items share one prefix (all codes but the last). Then no code keeps more than ceil(m / K) of them, so that
    none collide if m <= K. Items of codes that hold no more than that stay. The others are given codes with room so
    that the sum of squared distances is small (Sinkhorn, then rounded one by one).
    """
    codes, codebook = quantized.codes.copy(), quantized.codebooks[-1]
    residual = quantized.residual(len(quantized.codebooks) - 1)
    prefix = _groups(codes[:, :-1])
    order = np.argsort(prefix, kind="stable")
    for members in np.split(order, np.cumsum(np.bincount(prefix))[:-1]):
        held = np.bincount(codes[members, -1], minlength=len(codebook))
        limit = -(-len(members) // len(codebook))
        crowded = held > limit
        if crowded.any():
            moving = members[crowded[codes[members, -1]]]
            room = limit - np.where(crowded, 0, held)
            codes[moving, -1] = _transport(residual[moving], codebook, room)
    return codes


def _transport(points: Float32, codebook: Float32, room: Int64) -> Int32:
    """Codes [m] for m points with a small total squared distance; no code is used more often than it has room."""
    free = np.flatnonzero(room)
    if len(points) * len(free) > _MAX_PLAN:
        raise SemanticIdError(
            f"collisions: {len(points)} items compete for {len(free)} codes, too many for reassign; "
            "add a level, or use the method balanced"
        )
    target, source = codebook[free].astype(np.float64), points.astype(np.float64)
    cost = np.square(source).sum(axis=1)[:, None] + np.square(target).sum(axis=1) - 2 * source @ target.T
    plan = sinkhorn(np.maximum(cost, 0), room[free])

    def choose(rows: Int64, allowed: Bool) -> tuple[Int32, Float64]:
        left = np.where(allowed, plan[rows], -np.inf)
        return np.argmax(left, axis=1).astype(np.int32), -left.max(axis=1)

    return free[_in_turn(len(points), room[free], choose)].astype(np.int32)


def sinkhorn(cost: Float64, room: Int64, epsilon: float = _EPSILON) -> Float64:
    """The logarithm of a transport plan [m, K] whose rows add up to 1 and column k to at most room[k].

    cost: [m, K] >= 0. room: [K] >= 1, adds up to at least m. Among such plans it is the one with the least
    cost minus `epsilon` x (mean cost) x entropy.
    """
    log_kernel = -cost / max(epsilon * float(cost.mean()), np.finfo(np.float64).tiny)
    price = np.zeros(cost.shape[1])
    gain = -logsumexp(log_kernel, axis=1)
    for _ in range(_SINKHORN_ITERATIONS):
        before = price
        # A column under its bound costs nothing more; one over its bound becomes dearer for all rows.
        price = np.minimum(0.0, np.log(room) - logsumexp(log_kernel + gain[:, None], axis=0))
        gain = -logsumexp(log_kernel + price, axis=1)
        if np.abs(price - before).max() < 1e-4:
            break
    plan: Float64 = log_kernel + price + gain[:, None]
    return plan


def _groups(codes: Int32) -> Int64:
    """The index of each row among the distinct rows, [n]."""
    if not codes.shape[1]:
        return np.zeros(len(codes), np.int64)
    return np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1)


def id_catalog(item_ids: Sequence[str], codes: Int32, metadata: Sequence[dict[str, Any]]) -> Catalog:
    """Make a catalog that names code i of the first level "<a_i>", of the second "<b_i>", and so on.

    Raises CatalogError as Catalog.build does.
    """
    columns = [
        [f"<{chr(ord('a') + level)}_{code}>" for code in column.tolist()]
        for level, column in enumerate(codes.T)
    ]
    return Catalog.build(item_ids, list(zip(*columns, strict=True)), metadata)


def report(codes: Int32, sizes: Sequence[int]) -> dict[str, Any]:
    """How well ids use their codes, as plain JSON values.

    codes: [n, depth] with codes[:, l] < sizes[l].
    collision_rate: 1 - distinct ids / items, 0 if every item has its own. shared_items: the share of items whose id is
    shared. items_per_id: how many ids have 1, 2, ... items. For each level: utilisation, the share of its codes in
    use, and the entropy of its codes over items, in bits, at most log2(size).
    """
    n = len(codes)
    per_id = np.bincount(_groups(codes))
    many, ids = np.unique(per_id, return_counts=True)
    levels = []
    for size, column in zip(sizes, codes.T, strict=True):
        share = np.bincount(column, minlength=size) / n
        used = share[share > 0]
        entropy = abs(float(-(used * np.log2(used)).sum()))
        levels.append(
            {"size": size, "used": len(used), "utilisation": len(used) / size, "entropy_bits": entropy}
        )
    return {
        "items": n,
        "ids": len(per_id),
        "collision_rate": 1 - len(per_id) / n,
        "shared_items": float(per_id[per_id > 1].sum() / n),
        "max_items_per_id": int(per_id.max()),
        "items_per_id": {str(k): v for k, v in zip(many.tolist(), ids.tolist(), strict=True)},
        "levels": levels,
    }


def useless_levels(codes: Int32) -> str:
    """Says in a line which levels tell no items apart that the levels before do not, and which sizes fit the ids; "" if
    none. codes: [n, depth]."""
    told_apart = [len(np.unique(codes[:, :depth], axis=0)) for depth in range(codes.shape[1] + 1)]
    useless = [level for level in range(codes.shape[1]) if told_apart[level] == told_apart[level + 1]]
    if not useless or len(codes) == 1:
        return ""
    ids = told_apart[-1]
    if ids == 1:
        return f"no level tells items apart: all {len(codes)} vectors are alike"
    depth = min(codes.shape[1], int(np.log2(ids)))
    size = next(size for size in itertools.count(1) if (1 << size * depth) >= ids)
    fit = ",".join([str(1 << size)] * depth)
    many = "s" if len(useless) > 1 else ""
    return (
        f"level{many} {', '.join(map(str, useless))} tell{'' if many else 's'} nothing apart that the others do not: "
        f"they give {len(codes)} items {ids} ids; sizes that fit are {fit}"
    )


def format_report(found: dict[str, Any]) -> str:
    """Format a `report` as aligned text: a line for each level, then collisions and the histogram of items per id."""
    lines = ["level    size    used    use %  entropy   (max)"]
    for level, row in enumerate(found["levels"]):
        lines.append(
            f"{level:>5}{row['size']:>8}{row['used']:>8}{100 * row['utilisation']:>9.1f}"
            f"{row['entropy_bits']:>9.3f}{np.log2(row['size']):>8.3f}"
        )
    lines.append(f"items {found['items']}, ids {found['ids']}, collision rate {found['collision_rate']:.4f}")
    shared, most = found["shared_items"], found["max_items_per_id"]
    lines.append(f"items that share their id {100 * shared:.1f} %, at most {most} to an id")
    bins = np.zeros(len(_BINS), np.int64)
    for many, ids in found["items_per_id"].items():
        bins[np.searchsorted(_BINS, int(many), side="right") - 1] += ids
    names = [
        *map(str, _BINS[:4]),
        *(f"{low}-{high - 1}" for low, high in itertools.pairwise(_BINS[4:])),
        "50+",
    ]
    lines.append("items to an id  " + "".join(f"{name:>7}" for name in names))
    lines.append("ids             " + "".join(f"{ids:>7}" for ids in bins))
    return "\n".join(lines)
