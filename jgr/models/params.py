# SPDX-License-Identifier: Apache-2.0
"""Parameters are declared once, as a pytree of `Spec`; everything else is a tree-map over that declaration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jgr.config import UserError

PyTree = Any


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
            return (jnp.ones if spec.init == "ones" else jnp.zeros)(spec.shape, dtype)
        scale = 1 / math.sqrt(spec.fan_in) if spec.fan_in else 0.02
        return (scale * jax.random.normal(jax.random.fold_in(key, i), spec.shape)).astype(dtype)

    return jax.tree.unflatten(tree, [draw(i, s) for i, s in enumerate(leaves)])


def abstract(specs: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """The same tree of jax.ShapeDtypeStruct."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=_is_spec)


def count(specs: PyTree) -> int:
    """Number of parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=_is_spec))


def check(specs: PyTree, params: PyTree) -> None:
    """Raise CheckpointError naming every missing, unexpected or mis-shaped parameter."""
    wanted = _by_name(specs)
    found = _by_name(params)
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the config asks for {spec.shape}"
        for name, spec in wanted.items()
        if name in found and tuple(found[name].shape) != spec.shape
    ]
    if problems:
        raise CheckpointError("parameters do not fit the config: " + "; ".join(problems))


def _by_name(tree: PyTree) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
