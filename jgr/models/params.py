# SPDX-License-Identifier: Apache-2.0
"""Parameters are declared once, as a pytree of `Spec`; everything else is a tree-map over that declaration.

The weights of a model's layers are one stack, with the layers as the leading axis of every array: one loop serves all
layers, and a program compiles in the same time whatever the depth. A loop on a GPU copies each layer's weights out of
the stack before it multiplies by them; there the layers are held apart (`split_layers`) and the loop is unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgr import stopping
from jgr.config import UserError
from jgr.fields import one_line

PyTree = Any
SMALL = 1 << 14
"""Numbers of a parameter that is drawn by the program that all small ones share."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or not of the architecture that its config states."""


@dataclass(frozen=True)
class Spec:
    """One parameter. axes: logical axis names, one per dimension. fan_in scales "normal" (0: scale .02)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    fan_in: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.shape)} dimensions but {len(self.axes)} axis names: {self}")


def _is_spec(x: object) -> bool:
    return isinstance(x, Spec)


def initialize(specs: PyTree, key: jax.Array, dtype: Any = jnp.float32) -> PyTree:
    """Draw every parameter; leaf i uses fold_in(key, i), so adding one at the end changes no other."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=_is_spec)

    def draw(i: int, spec: Spec) -> jax.Array:
        if spec.init != "normal":
            return jnp.asarray((np.ones if spec.init == "ones" else np.zeros)(spec.shape, dtype))
        scale = np.float32(1 / math.sqrt(spec.fan_in) if spec.fan_in else 0.02)
        return jnp.asarray(scale * _normal(jax.random.fold_in(key, i), spec.shape), dtype)

    return jax.tree.unflatten(tree, [draw(i, s) for i, s in enumerate(leaves)])


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """jax.random.normal(key, shape). A number hangs on the key and its place alone, so that parameters of few numbers
    are the first of SMALL: one program is compiled for all of them, where one for each shape takes longer to compile
    than a small model to draw."""
    size = math.prod(shape)
    if size > SMALL or isinstance(key, jax.core.Tracer):
        return jax.random.normal(key, shape)
    return np.asarray(jax.random.normal(key, (SMALL,)))[:size].reshape(shape)


def abstract(specs: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """The declaration as shapes and dtypes: the same tree with a jax.ShapeDtypeStruct for each parameter."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=_is_spec)


def split_layers(stack: PyTree) -> tuple[PyTree, ...]:
    """A stack of layers as one tree of arrays for each layer. The stack is copied, and not freed here."""
    return tuple(layer_of(stack, number) for number in range(_depth(stack)))


def layer_of(layers: PyTree, number: int) -> PyTree:
    """One layer's tree, of a stack or of a tuple of layers."""
    return layers[number] if _are_apart(layers) else _take(layers, number)


Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


def over_layers(
    step: Step,
    h: jax.Array,
    layers: PyTree,
    *beside: PyTree,
    which: slice = slice(None),
    last: Step | None = None,
) -> tuple[jax.Array, PyTree]:
    """Run step(h, (layer, *of beside)) -> (h, left) layer after layer: gives the last h, and every `left`, stacked.

    layers: a stack, which is scanned, or a tuple of layers, for which the loop is unrolled.
    beside: arrays whose leading axis is the layers, or None.
    which: the layers to run; gradients are costly unless it is all of them.
    last: the step of the last layer that is run, where it differs; its h may have another shape.
    """
    numbers = range(_depth(layers))[which]
    scanned = 0 if _are_apart(layers) else len(numbers) - (last is not None)
    if scanned == _depth(layers):
        return jax.lax.scan(step, h, (layers, *beside))
    stacks = []
    if scanned:

        def by_number(h: jax.Array, number: jax.Array) -> tuple[jax.Array, Any]:
            return step(h, jax.tree.map(lambda x: x[number], (layers, *beside)))

        h, left = jax.lax.scan(
            by_number, h, jnp.asarray(numbers[:scanned])
        )  # scanning a slice of a stack would copy it
        stacks.append(left)
    traced_once = jax.jit(step)  # tracing a layer takes longer than compiling it
    for number in numbers[scanned:]:
        chosen = traced_once if last is None or number != numbers[-1] else last
        h, left = chosen(h, (layer_of(layers, number), *_take(beside, number)))
        stacks.append(jax.tree.map(lambda x: x[None], left))
    return h, jax.tree.map(lambda *x: jnp.concatenate(x), *stacks)


def _are_apart(layers: PyTree) -> bool:
    return type(layers) is tuple  # a stack may be a named tuple


def _depth(layers: PyTree) -> int:
    return len(layers) if _are_apart(layers) else jax.tree.leaves(layers)[0].shape[0]


def _take(stack: PyTree, number: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, number, keepdims=False), stack)


def count(specs: PyTree) -> int:
    """The number of numbers in all parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=_is_spec))


def check_finite(place: Path, params: PyTree) -> None:
    """Raise CheckpointError naming the first parameter of `place` with NaN or infinity: its model could not answer."""
    for name, values in by_name(params).items():
        stopping.check()
        if not np.isfinite(np.asarray(values)).all():
            raise CheckpointError(f"{place}: damaged checkpoint: {name} holds what is no finite number")


def check_shapes(wanted: Mapping[str, Spec], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError naming every missing, unexpected or mis-shaped parameter, the first ten of them."""
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {tuple(found[name])}, the config asks for {spec.shape}"
        for name, spec in wanted.items()
        if name in found and tuple(found[name]) != spec.shape
    ]
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise CheckpointError(f"parameters do not fit the config: {one_line(shown, 900)}")


def check(specs: PyTree, params: PyTree) -> None:
    """Raise CheckpointError naming every missing, unexpected or mis-shaped parameter of a tree, see check_shapes."""
    check_shapes(by_name(specs), {name: tuple(leaf.shape) for name, leaf in by_name(params).items()})


def by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree of Spec or of arrays by their names, such as `layers.wq`, in the tree's order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
