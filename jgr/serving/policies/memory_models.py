# SPDX-License-Identifier: Apache-2.0
"""What was learnt for memory control offline, as arrays: the base policy of HLEM-7 and boosted trees.

Both run in NumPy on the host, since a decision is far smaller than a dispatch to a device. They check their own shapes:
whoever has arrays from a file needs no other check before they decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.serving.policies.memory_signals import ACTIONS, FEATURES, STATE, Float32

WIDTHS = (64, 128)
"""Units of the two hidden layers."""
MOST_WEIGHT = 1e30
"""Sums of 128 products of such weights and numbers of the state are finite in 32 bits."""


class ControllerError(UserError):
    """Arrays that are not a memory controller's, or one of another state or other actions."""


def _array(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int, ...], dtype: type
) -> npt.NDArray[Any]:
    """One array of a file, checked. ControllerError where it is missing, of another shape or type, or not finite."""
    found = arrays.get(name)
    if found is None:
        raise ControllerError(f"there is no array {name}")
    if found.shape != shape or found.dtype != dtype:
        raise ControllerError(
            f"{name} is {found.dtype} {list(found.shape)}, not {np.dtype(dtype).name} {list(shape)}"
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ControllerError(f"{name} holds numbers that are not finite")
    return found


def require_same_world(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise ControllerError unless the file is for this state and these actions."""
    features = arrays.get("features")
    if features is None or features.ndim != 1 or features.dtype.kind != "U":
        raise ControllerError("there is no array features, which names the state")
    if tuple(features.tolist()) != FEATURES:
        raise ControllerError(
            f"it is for a state of {features.shape[0]} numbers ({', '.join(features.tolist()[:12])}), not of {STATE} "
            f"({', '.join(FEATURES)})"
        )
    actions = _array(arrays, "actions", (len(ACTIONS),), np.float64)
    if not np.array_equal(actions, ACTIONS):
        raise ControllerError(f"it is for the moves {actions.tolist()}, not {list(ACTIONS)}")


class BasePolicy:
    """The frozen actor of HLEM-7: two hidden layers with tanh, and a logit for each action.

    arrays: w0 f32 [STATE, 64], b0 [64], w1 [64, 128], b1 [128], w2 [128, actions], b2 [actions]. Raises ControllerError
    for anything else.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        require_same_world(arrays)
        sizes = (STATE, *WIDTHS, len(ACTIONS))
        self._layers = [
            (
                _array(arrays, f"w{at}", sizes[at : at + 2], np.float32),
                _array(arrays, f"b{at}", sizes[at + 1 : at + 2], np.float32),
            )
            for at in range(3)
        ]
        if max(float(np.abs(array).max()) for layer in self._layers for array in layer) > MOST_WEIGHT:
            raise ControllerError(f"a weight is beyond {MOST_WEIGHT:g}, so that logits may be no numbers")

    def logits(self, state: Float32) -> Float32:
        """state: f32 [STATE] or [n, STATE]. Returns f32 [actions] or [n, actions]."""
        (w0, b0), (w1, b1), (w2, b2) = self._layers
        return np.asarray(np.tanh(np.tanh(state @ w0 + b0) @ w1 + b1) @ w2 + b2, np.float32)

    def action(self, state: Float32) -> int:
        """The number of the most likely action."""
        return int(self.logits(state).argmax())


class Trees:
    """Boosted regression trees: the 99th percentile of the latency, over its limit, of a state at a candidate split.

    arrays, for n trees of at most m nodes: feature i32 [n, m], of STATE + 1 where the last is the candidate split and
    -1 is a leaf; threshold f32 [n, m]; left, right i32 [n, m], above the node's own number; value f32 [n, m]; start
    f32 [1]. Raises ControllerError for anything else; so every walk ends.
    """

    MOST_TREES, MOST_NODES = 512, 127

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        require_same_world(arrays)
        given = arrays.get("feature")
        if given is None or given.ndim != 2:
            raise ControllerError("there is no array feature of [trees, nodes]")
        shape = (int(given.shape[0]), int(given.shape[1]))
        if not (0 < shape[0] <= self.MOST_TREES and 0 < shape[1] <= self.MOST_NODES):
            raise ControllerError(
                f"{shape[0]} trees of {shape[1]} nodes: there must be 1 to {self.MOST_TREES} of 1 to {self.MOST_NODES}"
            )
        self._feature = _array(arrays, "feature", shape, np.int32)
        self._threshold = _array(arrays, "threshold", shape, np.float32)
        self._left, self._right = (_array(arrays, name, shape, np.int32) for name in ("left", "right"))
        self._value = _array(arrays, "value", shape, np.float32)
        self._start = float(_array(arrays, "start", (1,), np.float32)[0])
        inner, own = self._feature >= 0, np.arange(shape[1])
        if (self._feature > STATE).any() or (self._feature < -1).any():
            raise ControllerError("a tree asks for a number that the state does not have")
        for children in (self._left, self._right):
            if ((children <= own) & inner).any() or ((children >= shape[1]) & inner).any():
                raise ControllerError("a tree's child does not stand behind its parent")

    def predict(self, rows: Float32) -> Float32:
        """rows: f32 [n, STATE + 1]. Returns f32 [n]."""
        trees = np.arange(len(self._feature))[:, None]
        at = np.zeros((len(self._feature), len(rows)), np.intp)
        numbers = np.arange(len(rows))[None]
        for _ in range(self._feature.shape[1]):
            feature = self._feature[trees, at]
            inner = feature >= 0
            if not inner.any():
                break
            goes_left = rows[numbers, feature] <= self._threshold[trees, at]
            at = np.where(inner, np.where(goes_left, self._left[trees, at], self._right[trees, at]), at)
        return np.asarray(self._start + self._value[trees, at].sum(0), np.float32)
