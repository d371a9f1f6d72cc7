# SPDX-License-Identifier: Apache-2.0
"""Item embeddings that know vectors of the items: train.item_vectors.

The one idea: while a retriever trains, an item's embedding is a row of its own plus a learnt projection of its vector,

    embed[i] = rows[i] + vectors[i] @ projection

so that what is learnt of one item holds for those like it, and the row tells what is the item's alone. At the end the
sum is written out as the embedding: a served model is as large and as fast as one without vectors, and nothing but
training needs them.

Letters: n items, e dimensions of a vector, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.models.params import PyTree, Spec
from jgr.training.trainer import Loss

Float32 = npt.NDArray[np.float32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Informed:
    """The parameters of a retriever that trains with vectors, or their specs."""

    model: Any  # with embed, [n, D]: the items' own rows
    projection: Any  # [e, D]


def spec(model: Any, dims: int) -> Informed:
    """The declaration of the parameters. model: that of a retriever. dims: e."""
    hidden = model.embed.shape[1]
    return Informed(model, Spec((dims, hidden), ("features", "embed")))


def folded(params: Informed, vectors: jax.Array | Float32) -> PyTree:
    """The retriever's parameters, with the projected vectors in its embedding."""
    return replace(params.model, embed=params.model.embed + jnp.asarray(vectors) @ params.projection)


def informed_loss(loss: Loss, vectors: jax.Array | Float32) -> Loss:
    """The loss of `folded` parameters, whose gradients reach the rows and the projection."""

    def of(params: PyTree, windows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(folded(params, vectors), windows, key)

    return of
