# SPDX-License-Identifier: Apache-2.0
"""Models that score every item of a catalog after a history by one matmul: SASRec, LRURec and HSTU.

A retriever's module gives three functions and a config by whose type they are found. Ranking, saving and loading are
the same for all, and so is training (`jgr.training.retriever`).

Letters: B batch, N items of a history, n items of the catalog, D hidden, b histories, k places.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import TrainConfig, UserError
from jgr.data.interactions import Ragged, refuse_long
from jgr.fields import one_line
from jgr.models import checkpoint, hstu, lru_rec, repeats, sasrec, tables
from jgr.models.config_file import read_object, scorer_config
from jgr.models.hstu import HstuConfig, HstuParams
from jgr.models.lru_rec import LruRecConfig, LruRecParams
from jgr.models.model_files import ModelFiles
from jgr.models.params import CheckpointError, PyTree
from jgr.models.sasrec import Dropout, SasrecConfig, SasrecParams

BATCH = 256  # histories that are ranked at once

RetrieverConfig = SasrecConfig | LruRecConfig | HstuConfig
"""Each with n_items, max_items, and items, the digest of the catalog's item ids."""
RetrieverParams = SasrecParams | LruRecParams | HstuParams


class Retriever(Protocol):
    """The module of a retriever."""

    NAME: str
    """The model's name in messages and reports."""

    def spec(self, cfg: Any) -> PyTree:
        """The declaration of every parameter."""

    def encode(
        self,
        params: Any,
        cfg: Any,
        rows: jax.Array,
        *,
        dropout: Dropout | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Turn histories into vectors [B, N, D]: at each place, what is looked for after the items up to it.

        rows: [B, N] int32, -1 on the right. dropout: (x, key) -> x, for training; needs key.
        """

    def output(self, params: Any, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
        """What the scores of items are made of: their vectors [..., D], and their biases [...] where the model has any.

        rows: [...] int32, the items; no other row of the table is touched. None: all n items, in row order.
        """


# By train.model, which is also config.json's model_type.
_CONFIGS: dict[str, type[RetrieverConfig]] = {
    "sasrec": SasrecConfig,
    "lrurec": LruRecConfig,
    "hstu": HstuConfig,
}
_RETRIEVERS: dict[type, Retriever] = {SasrecConfig: sasrec, LruRecConfig: lru_rec, HstuConfig: hstu}
MODELS = tuple(_CONFIGS)


def retriever(cfg: RetrieverConfig) -> Retriever:
    """The functions of the model that a config describes."""
    return _RETRIEVERS[type(cfg)]


def items_digest(item_ids: Sequence[str]) -> str:
    """First 16 hex digits of the sha256 over the item ids in row order; semantic ids do not change it."""
    return hashlib.sha256(json.dumps(item_ids).encode()).hexdigest()[:16]


def make_config(train: TrainConfig, item_ids: Sequence[str]) -> RetrieverConfig:
    """The retriever that a TrainConfig describes, for a catalog. train.model: one of MODELS. Raises ConfigError."""
    return _CONFIGS[train.model].of(train, len(item_ids), items_digest(item_ids))


def timed(cfg: RetrieverConfig) -> bool:
    """Whether `encode` needs times."""
    return isinstance(cfg, HstuConfig) and cfg.timed


def encode(
    params: RetrieverParams,
    cfg: RetrieverConfig,
    rows: jax.Array,
    times: jax.Array | None = None,
    *,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Turn histories into vectors [B, N, D], see Retriever.encode.

    times: [B, N + 1] int32 for models that are `timed`, see `hstu.encode`; others take None.
    """
    if isinstance(cfg, HstuConfig) and isinstance(params, HstuParams):
        return hstu.encode(params, cfg, rows, times=times, dropout=dropout, key=key)
    return retriever(cfg).encode(params, cfg, rows, dropout=dropout, key=key)


@functools.partial(jax.jit, static_argnames="cfg")
def scores_after(
    params: RetrieverParams, rows: jax.Array, times: jax.Array | None = None, *, cfg: RetrieverConfig
) -> jax.Array:
    """The score of every item after each history, [B, n] float32. rows, times: see `encode`."""
    model = retriever(cfg)
    hidden = encode(params, cfg, rows, times)
    last = jnp.maximum((rows >= 0).sum(axis=1) - 1, 0)
    embed, bias = model.output(params)
    scores = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0] @ embed.T
    scores = scores if bias is None else scores + bias
    if params.repeats is None:
        return scores
    return repeats.add_to_all(scores, params.repeats, repeats.window(rows), last)


@functools.partial(jax.jit, static_argnames=("cfg", "k", "exclude_seen"))
def _best(
    params: RetrieverParams,
    rows: jax.Array,
    seen: jax.Array,
    times: jax.Array | None,
    *,
    cfg: RetrieverConfig,
    k: int,
    exclude_seen: bool,
) -> jax.Array:
    scores = scores_after(params, rows, times, cfg=cfg)
    if exclude_seen:
        at = jnp.where(seen >= 0, seen, cfg.n_items)
        scores = scores.at[jnp.arange(len(rows))[:, None], at].set(-jnp.inf, mode="drop")
    values, best = jax.lax.top_k(scores, k)
    return jnp.where(jnp.isneginf(values), -1, best)


def top_k(
    params: RetrieverParams,
    cfg: RetrieverConfig,
    histories: Ragged,
    k: int,
    *,
    exclude_seen: bool,
    asked: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int32]:
    """The k best rows after each history, best first: [b, k] int32, -1 where the catalog has no further item.

    Equal scores: the lower row first. exclude_seen: leave out the items of the whole history. asked: [b] int64
    seconds, when the item that is looked for will be taken; only for `timed` models, whose histories must have times
    too. Raises UserError where they are missing, or too far apart.
    """
    if timed(cfg):
        _require_times(cfg, histories, asked)
    found = np.full((len(histories), k), -1, np.int32)
    places = min(k, cfg.n_items)
    # Two shapes at most are compiled: the seen items are padded to the longest history.
    width = int(histories.lengths.max(initial=1)) if exclude_seen else 1
    for at in range(0, len(histories), BATCH):
        batch = histories.select(slice(at, at + BATCH))
        rows = np.full((BATCH, cfg.max_items), -1, np.int32)
        seen = np.full((BATCH, width), -1, np.int32)
        times = np.zeros((BATCH, cfg.max_items + 1), np.int32) if timed(cfg) else None
        for i, history in enumerate(batch):
            recent = history[-cfg.max_items :]
            rows[i, : len(recent)] = recent
            if times is not None and asked is not None and len(recent):
                happened = batch.times_of(i)[-cfg.max_items :]
                times[i, : len(recent)] = happened - happened[0]
                times[i, len(recent)] = asked[at + i] - happened[0]
            if exclude_seen:
                seen[i, : len(history)] = history
        best = _best(params, rows, seen, times, cfg=cfg, k=places, exclude_seen=exclude_seen)
        found[at : at + BATCH, :places] = np.asarray(best)[: len(batch)]
    return found


def _require_times(cfg: RetrieverConfig, histories: Ragged, asked: npt.NDArray[np.int64] | None) -> None:
    if asked is None or histories.times is None:
        raise UserError("this retriever depends on times, and the histories have none")
    some = histories.lengths > 0
    first = np.maximum(histories.starts, histories.stops - cfg.max_items)[some]
    refuse_long(asked[some] - histories.times[first], "this retriever depends on times", UserError)


def save(
    folder: Path,
    cfg: RetrieverConfig,
    params: RetrieverParams,
    write_beside: Callable[[Path], None],
    rows: str = "none",
    held: int | None = None,
) -> None:
    """A model folder: config.json, params/, and what write_beside(folder) adds. See jgr.models.checkpoint.write.

    rows, held: their type, and how many, see `tables.apart`.
    """
    params, write_beside = tables.apart(cfg, params, rows, write_beside, held)
    model_type = next(name for name, of in _CONFIGS.items() if of is type(cfg))
    checkpoint.write(folder, {"model_type": model_type, **dataclasses.asdict(cfg)}, params, write_beside)


def load_config(folder: Path) -> RetrieverConfig:
    """Read the config of the folder that `save` wrote. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        return scorer_config(read_object(path), _CONFIGS)
    except ValueError as error:
        reason = one_line(str(error).removeprefix(f"{path}: "))
        raise CheckpointError(
            f"{path}: is not the config of a retriever that jgr trained: {reason}"
        ) from None


def load(folder: Path) -> tuple[RetrieverConfig, RetrieverParams]:
    """Read the folder that `save` wrote: config and parameters. Raises CheckpointError."""
    files = ModelFiles(folder)
    files.check_sizes()
    cfg = load_config(folder)
    specs = retriever(cfg).spec(cfg)
    tables.require_size(folder, cfg, specs, files)
    files.check()
    params = checkpoint.restore(folder, tables.declared(folder, cfg, specs))
    return cfg, tables.joined(folder, cfg, specs, params, files)


def load_for(folder: Path, item_ids: Sequence[str]) -> tuple[RetrieverConfig, RetrieverParams]:
    """`load`, refusing with UserError a retriever that was trained on other items, or on another order of them."""
    cfg, params = load(folder)
    if cfg.items != items_digest(item_ids):
        raise UserError(f"{folder}: was trained on other items than the dataset's")
    return cfg, params
