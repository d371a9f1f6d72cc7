# SPDX-License-Identifier: Apache-2.0
"""Configurations of kernels chosen by measurement (XGR-6).

`python -m tools.tune` times an op's candidates over many shapes on one device and fits a decision tree that predicts
log(seconds) from features of shape and configuration. The tree is a JSON file in jgr/ops/tuned, one per op and kind of
device; at trace time the candidate with the least prediction is taken. Where there is no tree for the device, or the
shape is outside what was measured, the op's own heuristic decides.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jax

from jgr.ops.dispatch import target_platform

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOLDER = Path(__file__).parent / "tuned"
Candidate = TypeVar("Candidate", bound="DataclassInstance")
Shape = TypeVar("Shape", bound=tuple[int, ...])


@dataclass(frozen=True)
class Tree:
    """A regression tree over features of a shape and a configuration.

    low, high: for each number of the shape the least and the greatest value that was measured. feature: -1 at a leaf.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]

    def __post_init__(self) -> None:
        nodes = len(self.feature)
        lists = (self.threshold, self.left, self.right, self.value)
        if not nodes or any(len(x) != nodes for x in lists) or len(self.low) != len(self.high):
            raise ValueError("a tree's lists differ in length")
        for at, feature in enumerate(self.feature):
            children = (self.left[at], self.right[at])
            if feature >= 0 and not all(at < child < nodes for child in children):  # so that every walk ends
                raise ValueError(f"node {at} of a tree has children {children}")

    def covers(self, shape: Sequence[float]) -> bool:
        return len(shape) == len(self.low) and all(
            low <= x <= high for low, x, high in zip(self.low, shape, self.high, strict=True)
        )

    def predict(self, features: Sequence[float]) -> float:
        at = 0
        while self.feature[at] >= 0:
            at = self.left[at] if features[self.feature[at]] <= self.threshold[at] else self.right[at]
        return self.value[at]


def target_device() -> str:
    """The kind of device that the program being traced is for, as the tuned files name it: "nvidia-h200", "cpu-2"."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        kind = abstract.device_kind
    elif target_platform() == "cpu":
        kind = f"cpu {os.cpu_count()}"  # every CPU calls itself "cpu"; the number of cores matters most
    else:
        kind = jax.devices()[0].device_kind
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


@functools.cache
def load(op: str, device: str) -> Tree | None:
    """The tree of an op on a kind of device, or None. Raises ValueError where the file is damaged."""
    path = FOLDER / f"{op}.{device}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())["tree"]
    return Tree(**{name: tuple(values) for name, values in data.items()})


def plain_features(shape: tuple[int, ...], candidate: DataclassInstance) -> tuple[float, ...]:
    """The numbers of the shape and of the configuration."""
    return (*shape, *astuple(candidate))


def choose(
    op: str,
    shape: Shape,
    candidates: Sequence[Candidate],
    otherwise: Candidate,
    features: Callable[[Shape, Candidate], Sequence[float]] = plain_features,
) -> Candidate:
    """The candidate that the tree of `op` expects to be fastest, the first of equals; or `otherwise`.

    candidates: dataclasses of numbers. features: makes the numbers that the tree was fitted on.
    """
    tree = load(op, target_device())
    return otherwise if tree is None else best(tree, shape, candidates, otherwise, features)


def best(
    tree: Tree,
    shape: Shape,
    candidates: Sequence[Candidate],
    otherwise: Candidate,
    features: Callable[[Shape, Candidate], Sequence[float]] = plain_features,
) -> Candidate:
    """See `choose`."""
    if not candidates or not tree.covers(shape):
        return otherwise
    return min(candidates, key=lambda candidate: tree.predict(features(shape, candidate)))
