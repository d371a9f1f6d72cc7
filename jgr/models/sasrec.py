# SPDX-License-Identifier: Apache-2.0
"""SASRec: a causal transformer over item ids, the baseline that sequential recommenders are compared with (MODEL-11).

    h = dropout(embed[items] * sqrt(D) + position)
    per layer:  h += attention(norm(h));  h += W2 relu(W1 norm(h))
    score of item i after the history's last item = norm(h) . embed[i]

Layers are scanned. It ranks a whole catalog by one matmul, so it is no generator: `top_k` is its only use.

Letters: B batch, N items of a history, n items of the catalog, L layers, D hidden, H heads, F mlp, k places.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import TrainConfig
from jgr.data.interactions import Ragged
from jgr.models import checkpoint
from jgr.models.params import CheckpointError, Spec
from jgr.ops.dense import dense
from jgr.ops.segment_attention import Causal, segment_attention

Dropout = Callable[[jax.Array, jax.Array], jax.Array]

MODEL_TYPE = "sasrec"
NORM_EPS = 1e-6
BATCH = 256  # histories that are ranked at once


@dataclass(frozen=True)
class SasrecConfig:
    """Architecture only. items: what `items_digest` gives for the catalog whose rows it embeds."""

    n_items: int
    max_items: int
    hidden: int
    layers: int
    heads: int
    mlp: int
    items: str


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SasrecLayer:
    """Leading axis L on every leaf; norms are (scale, bias)."""

    attention_norm: Any  # [L, 2, D]
    wq: Any  # [L, D, D]
    wk: Any  # [L, D, D]
    wv: Any  # [L, D, D]
    wo: Any  # [L, D, D]
    mlp_norm: Any  # [L, 2, D]
    w1: Any  # [L, D, F]
    b1: Any  # [L, F]
    w2: Any  # [L, F, D]
    b2: Any  # [L, D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SasrecParams:
    embed: Any  # [n, D]
    position: Any  # [N, D]
    layers: SasrecLayer
    norm: Any  # [2, D]


def items_digest(item_ids: Sequence[str]) -> str:
    """First 16 hex digits of the sha256 over the item ids in row order: equal for catalogs of other semantic ids."""
    return hashlib.sha256(json.dumps(item_ids).encode()).hexdigest()[:16]


def sasrec_config(train: TrainConfig, item_ids: Sequence[str]) -> SasrecConfig:
    """The SASRec that a TrainConfig describes; kv_heads and head_dim say nothing to it."""
    return SasrecConfig(
        n_items=len(item_ids),
        max_items=train.max_items,
        hidden=train.hidden,
        layers=train.layers,
        heads=train.heads,
        mlp=train.mlp,
        items=items_digest(item_ids),
    )


def spec(cfg: SasrecConfig) -> SasrecParams:
    """The declaration of every parameter. A norm's scale is stored less 1, so that it is drawn as zeros."""
    n, hidden, mlp = cfg.layers, cfg.hidden, cfg.mlp

    def square() -> Spec:
        return Spec((n, hidden, hidden), ("layer", "embed", "heads"), fan_in=hidden)

    def norm() -> Spec:
        return Spec((n, 2, hidden), ("layer", "norm", "embed"), "zeros")

    layers = SasrecLayer(
        attention_norm=norm(),
        wq=square(),
        wk=square(),
        wv=square(),
        wo=square(),
        mlp_norm=norm(),
        w1=Spec((n, hidden, mlp), ("layer", "embed", "mlp"), fan_in=hidden),
        b1=Spec((n, mlp), ("layer", "mlp"), "zeros"),
        w2=Spec((n, mlp, hidden), ("layer", "mlp", "embed"), fan_in=mlp),
        b2=Spec((n, hidden), ("layer", "embed"), "zeros"),
    )
    return SasrecParams(
        Spec((cfg.n_items, hidden), ("items", "embed")),
        Spec((cfg.max_items, hidden), ("positions", "embed")),
        layers,
        Spec((2, hidden), ("norm", "embed"), "zeros"),
    )


def _norm(x: jax.Array, scale_bias: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)
    return x * (1 + scale_bias[0]) + scale_bias[1]


def encode(
    params: SasrecParams,
    cfg: SasrecConfig,
    rows: jax.Array,
    *,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """[B, N, D]: at each place what is looked for after the items up to it. rows: [B, N] int32, -1 on the right.

    dropout: (x, key) -> x on the embedding and on each block's output, for training; needs key.
    """
    keys = None if key is None else jax.random.split(key, (cfg.layers + 1, 2))
    lengths = (rows >= 0).sum(axis=1)

    def drop(x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return x if dropout is None or dropout_key is None else dropout(x, dropout_key)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], cfg.heads, -1)

    def layer_step(h: jax.Array, xs: tuple[SasrecLayer, jax.Array | None]) -> tuple[jax.Array, None]:
        layer, layer_keys = xs
        attention_key, mlp_key = (None, None) if layer_keys is None else (layer_keys[0], layer_keys[1])
        x = _norm(h, layer.attention_norm)
        k, v = (heads(dense(x, w)).transpose(0, 2, 1, 3) for w in (layer.wk, layer.wv))
        q = heads(dense(x, layer.wq))
        out = segment_attention(q, k, v, Causal(lengths), implementation="xla")  # the form with gradients
        h = h + drop(dense(out.reshape(h.shape), layer.wo), attention_key)
        x = jax.nn.relu(dense(_norm(h, layer.mlp_norm), layer.w1) + layer.b1)
        return h + drop(dense(x, layer.w2) + layer.b2, mlp_key), None

    h = params.embed[jnp.maximum(rows, 0)] * cfg.hidden**0.5 + params.position[: rows.shape[1]]
    h = drop(h, None if keys is None else keys[-1, 0])
    h, _ = jax.lax.scan(layer_step, h, (params.layers, None if keys is None else keys[:-1]))
    return _norm(h, params.norm)


@functools.partial(jax.jit, static_argnames=("cfg", "k", "exclude_seen"))
def _best(
    params: SasrecParams, rows: jax.Array, seen: jax.Array, *, cfg: SasrecConfig, k: int, exclude_seen: bool
) -> jax.Array:
    hidden = encode(params, cfg, rows)
    last = jnp.maximum((rows >= 0).sum(axis=1) - 1, 0)
    scores = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0] @ params.embed.T
    if exclude_seen:
        at = jnp.where(seen >= 0, seen, cfg.n_items)
        scores = scores.at[jnp.arange(len(rows))[:, None], at].set(-jnp.inf, mode="drop")
    values, best = jax.lax.top_k(scores, k)
    return jnp.where(jnp.isneginf(values), -1, best)


def top_k(
    params: SasrecParams, cfg: SasrecConfig, histories: Ragged, k: int, *, exclude_seen: bool
) -> npt.NDArray[np.int32]:
    """The k best rows after each history, best first: [b, k] int32, -1 where the catalog has no further item.

    Equal scores: the lower row first. exclude_seen: leave out the items of the whole history.
    """
    found = np.full((len(histories), k), -1, np.int32)
    places = min(k, cfg.n_items)
    # Two shapes at most are compiled: whatever is seen is padded to the longest history.
    width = int(histories.lengths.max(initial=1)) if exclude_seen else 1
    for at in range(0, len(histories), BATCH):
        batch = histories.select(slice(at, at + BATCH))
        rows = np.full((BATCH, cfg.max_items), -1, np.int32)
        seen = np.full((BATCH, width), -1, np.int32)
        for i, history in enumerate(batch):
            recent = history[-cfg.max_items :]
            rows[i, : len(recent)] = recent
            if exclude_seen:
                seen[i, : len(history)] = history
        best = _best(params, rows, seen, cfg=cfg, k=places, exclude_seen=exclude_seen)
        found[at : at + BATCH, :places] = np.asarray(best)[: len(batch)]
    return found


def save(folder: Path, cfg: SasrecConfig, params: SasrecParams, write_beside: Callable[[Path], None]) -> None:
    """A model folder: config.json, params/, and what write_beside(folder) adds. See jgr.models.checkpoint.write."""
    checkpoint.write(folder, {"model_type": MODEL_TYPE, **dataclasses.asdict(cfg)}, params, write_beside)


def load(folder: Path) -> tuple[SasrecConfig, SasrecParams]:
    """What `save` wrote. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("model_type") != MODEL_TYPE:
            raise KeyError("model_type")
        cfg = SasrecConfig(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: is not the config of a SASRec that jgr trained") from None
    return cfg, checkpoint.restore(folder / "params", spec(cfg))
