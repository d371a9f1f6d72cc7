# SPDX-License-Identifier: Apache-2.0
"""Train Climber (MODEL-18) or DLRMv3's HSTU (MODEL-17) on impressions: what users did with what they were shown.

An example is a past request (`jgr.data.impressions`): a history of items, actions and times, and the impressions that
share it, none of which sees another (SUMI). The loss is the binary cross-entropy of every task, summed over the tasks
with feedback.weights. Scores are computed by the same two functions as in serving, `read` and `score`.

Letters: B batch, S = max_items, M impressions in a window, m candidates, P tasks, n items in the catalog.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import Config, ConfigError, TrainConfig
from jgr.data.datasets import Dataset
from jgr.data.impressions import Requests, action_bits, feedback_of, requests
from jgr.data.interactions import refuse_long
from jgr.models import checkpoint, scorers
from jgr.models.climber import ClimberConfig, Feature
from jgr.models.params import PyTree
from jgr.models.retrievers import items_digest
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import WEEK, StuScorerConfig
from jgr.training.run import Progress, train_to_best
from jgr.training.trainer import Loss
from jgr.training.windows import Batches

Int32 = npt.NDArray[np.int32]
Features = Mapping[str, npt.NDArray[Any]]
"""The items' features by name: [n, width] each, float32 numbers or int32 categories."""

METRIC = "auc"
"""The validated metric: the mean over the tasks of the area under the ROC curve."""
TIME_ROWS = 256  # stu's time buckets: square roots of minutes, up to six weeks
_LEAST = 1e-6  # the least probability in the loss, so that its logarithm is finite


def make_config(config: Config, dataset: Dataset, features: Features) -> ScorerConfig:
    """The config of the scorer that config.train and config.feedback describe. Raises UserError if they do not fit."""
    action_bits(dataset.interactions, config.feedback.tasks, "feedback.tasks")
    if config.train.dropout:
        raise ConfigError(f"train.dropout: {config.train.model} has none; set it to 0")
    scenarios = int(feedback_of(dataset.interactions.sequences)[1].max()) + 1
    try:
        if config.train.model == "stu":
            return _stu_config(config, dataset, features, scenarios)
        return _climber_config(config, dataset, features, scenarios)
    except ValueError as error:  # sizes that do not divide
        raise ConfigError(f"train.model={config.train.model}: {error}") from None


def _stu_config(config: Config, dataset: Dataset, features: Features, scenarios: int) -> StuScorerConfig:
    train = config.train
    if features:
        raise ConfigError("features.schema: stu reads no features; leave it empty")
    return StuScorerConfig(
        StuConfig(
            hidden=train.hidden,
            layers=train.layers,
            heads=train.heads,
            qk_dim=train.head_dim,
            v_dim=train.head_dim,
            length=train.max_items + 1,
            contextual=1,
        ),
        n_items=dataset.catalog.n_items,
        max_items=train.max_items,
        item_dim=train.hidden,
        actions=len(dataset.interactions.actions),
        action_dim=config.feedback.action_dim,
        slots=(scenarios,),  # the request's scenario
        mlp=train.mlp,
        position_rows=train.max_items + 2,
        time_rows=TIME_ROWS,
        tasks=config.feedback.tasks,
        items=items_digest(dataset.catalog.item_ids),
    )


def _climber_config(config: Config, dataset: Dataset, features: Features, scenarios: int) -> ClimberConfig:
    train, feedback = config.train, config.feedback
    behaviours = []
    for names in feedback.behaviours:
        bits = action_bits(dataset.interactions, tuple(filter(None, names.split("+"))), "feedback.behaviours")
        behaviours.append(sum(1 << bit for bit in set(bits)))
    return ClimberConfig(
        n_items=dataset.catalog.n_items,
        max_items=train.max_items,
        blocks=feedback.blocks,
        layers=train.layers,
        hidden=train.hidden,
        heads=train.heads,
        mlp=train.mlp,
        tasks=feedback.tasks,
        items=items_digest(dataset.catalog.item_ids),
        experts=feedback.experts,
        scenarios=scenarios,
        timed=feedback.timed,
        actions=len(dataset.interactions.actions),
        behaviours=tuple(behaviours),
        features=tuple(
            Feature(name, array.shape[1], feedback.rows if array.dtype.kind in "iu" else 0)
            for name, array in features.items()
        ),
    )


class ImpressionWindows(Batches):
    """Batches of a split's requests, each with at most feedback.candidates impressions."""

    def __init__(self, found: Requests, train: TrainConfig, candidates: int) -> None:
        super().__init__(train, np.ones(len(found), np.int64))
        self._requests, self._candidates = found, candidates

    def digest(self) -> str:
        """The hash of the events and of the requests among them; see Batches."""
        digest, events = hashlib.sha256(), self._requests.histories
        for array in (events.rows, *feedback_of(events), events.starts, self._requests.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(self._requests.shown.tobytes())
        return digest.hexdigest()[:16]

    def batch(self, step: int) -> Int32:
        """The windows of a step's requests, as `windows` makes them."""
        return windows(self._requests, self._place(step)[2], self._train.max_items, self._candidates)


def windows(
    found: Requests, chosen: npt.NDArray[np.int64], max_items: int, candidates: int
) -> npt.NDArray[np.int32]:
    """The windows of the chosen requests, [B, S + M, 4] int32: row (-1 for padding), seconds, actions, scenario. Each
    window's seconds count from the last whole week since 1970 before its first event.

    max_items: S, the last events of a history, which come first. candidates: M, the impressions after them, which all
    have the request's time and scenario.
    """
    events = found.histories
    actions, scenarios, times = feedback_of(events)
    asked = found.times[chosen]
    made = np.zeros((len(chosen), max_items + candidates, 4), np.int32)
    made[..., 0] = -1
    for window, i, now in zip(made, chosen.tolist(), asked, strict=True):
        start, stop, shown = events.starts[i], events.stops[i], found.places(i)
        recent = slice(max(start, stop - max_items), stop)
        for at, places in (
            (slice(stop - recent.start), recent),
            (slice(max_items, max_items + len(shown)), shown),
        ):
            window[at, 0], window[at, 2], window[at, 3] = (
                events.rows[places],
                actions[places],
                scenarios[places],
            )
        # As in serving: absolute seconds leave 32 bits in 2038.
        origin = (int(times[recent.start]) if recent.start < stop else now) // WEEK * WEEK
        window[: stop - recent.start, 1] = times[recent] - origin
        window[max_items:, 1] = now - origin
    return made


def refuse_long_windows(found: Requests, train: TrainConfig) -> None:
    """Raise ConfigError where a window's seconds, which `windows` counts from its first week, leave 32 bits."""
    first = np.maximum(found.histories.starts, found.histories.stops - train.max_items)
    origin = feedback_of(found.histories)[2][first] // WEEK * WEEK
    refuse_long(found.times - origin, f"train.model={train.model}", ConfigError)


def scores(
    params: PyTree, cfg: ScorerConfig, windows: jax.Array, features: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The probabilities of the windows' impressions, [B, M, P], and their actions, [B, M] bits; -1: no impression."""
    model = scorers.scorer(cfg)
    needs = model.needs(cfg)
    history, shown = windows[:, : needs.max_items], windows[:, needs.max_items :]
    now, scenario = shown[:, 0, 1], shown[:, 0, 3]
    context = scenario[:, None] if needs.slots else jnp.zeros((len(windows), 0), jnp.int32)
    users = Users(history[..., 0], history[..., 2], history[..., 1], now, context, scenario)
    rows = shown[..., 0]
    described = {name: features[name][jnp.maximum(rows, 0)] for name, _ in needs.features}
    found = model.score(params, cfg, model.read(params, cfg, users), Candidates(rows, described))
    return found, jnp.where(rows >= 0, shown[..., 2], -1)


def feedback_loss(
    cfg: ScorerConfig, bits: tuple[int, ...], weights: tuple[float, ...], features: Features
) -> Loss:
    """The loss over windows made by `windows`. bits: the tasks' bits. weights: the tasks' weights; empty: all 1."""
    of_task = jnp.asarray(weights or (1.0,) * len(bits))
    shifts, arrays = jnp.asarray(bits), {name: jnp.asarray(array) for name, array in features.items()}

    def loss(params: PyTree, windows: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        del key  # nothing here is random
        found, actions = scores(params, cfg, windows, arrays)
        done = (actions[..., None] >> shifts) & 1
        right = jnp.clip(jnp.where(done == 1, found, 1 - found), _LEAST, 1.0)
        real = actions >= 0
        return jnp.where(real, -jnp.log(right) @ of_task, 0.0).sum(), real.sum().astype(jnp.float32)

    return loss


def _described(features: Features) -> dict[str, Any]:
    """What a run depends on of the items' features: the name, shape and content of each."""
    found = {
        name: [
            *map(str, (array.dtype, *array.shape)),
            hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16],
        ]
        for name, array in features.items()
    }
    return {"features": found} if found else {}


def train_feedback(
    config: Config,
    dataset: Dataset,
    features: Features,
    progress: Progress = lambda done, total, status: None,
    validate: Callable[[ScorerConfig, PyTree], float] | None = None,
) -> Path:
    """Train on the requests of the training split and write train.out. See `train_generator` for the other arguments.

    features: the features that features.schema names. validate: computes METRIC. Raises UserError if the dataset has no
    feedback, or none on these tasks.
    """
    train, feedback = config.train, config.feedback
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    cfg = make_config(config, dataset, features)
    checkpoint.require_writable(Path(train.out))
    learnt = requests(dataset.interactions, dataset.interactions.train, feedback.candidates)
    refuse_long_windows(learnt, train)
    bits = action_bits(dataset.interactions, feedback.tasks, "feedback.tasks")

    def save(params: PyTree, write_beside: Callable[[Path], None]) -> None:
        scorers.save(Path(train.out), cfg, params, write_beside, train.tables)

    return train_to_best(
        config,
        dataset.catalog,
        scorers.scorer(cfg).spec(cfg),
        feedback_loss(cfg, bits, feedback.weights, features),
        ImpressionWindows(learnt, train, feedback.candidates),
        described={"items": cfg.items, "feedback": asdict(feedback), **_described(features)},
        validate=None if validate is None else lambda params: validate(cfg, params),
        progress=progress,
        save=save,
        metric=METRIC,
    )
