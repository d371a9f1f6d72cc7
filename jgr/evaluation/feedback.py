# SPDX-License-Identifier: Apache-2.0
"""How well a scorer predicts what users do, asked of an engine or a server: AUC and log loss of every task.

What is asked are the requests of a split (`jgr.data.impressions`): a user's impressions of a day in a scenario, after
the history that was there before them, with what the user had done by then. Beside the model stand
- popularity: the share of an item's impressions that were followed by the action, shrunk towards that of all;
- logistic: a logistic regression on the logits of such shares of the item, of the scenario and of the user.

Both baselines are fitted on the training split; in it, an impression's own outcome is left out of the item's and the
scenario's share. The user's share is of what came before the request, here and in the split that is measured: the
baseline knows the past of a test user, as the model does.

Letters: k impressions, u users, P tasks, r resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.data.impressions import Requests, action_bits, feedback_of, recorded, requests
from jgr.data.interactions import Interactions
from jgr.evaluation import bootstrap
from jgr.evaluation.binary_metrics import Areas, auc, gauc, log_loss, normalised_entropy
from jgr.evaluation.served import EvaluationError, Served
from jgr.models.scorers import Needs

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

METRICS = ("auc", "gauc", "log_loss", "ne")
PRIOR = 20.0
"""How many impressions the overall share counts for in the share of an item, a scenario or a user (shrinkage)."""
NEWTON_STEPS = 25
RIDGE = 1e-3


@dataclass(frozen=True)
class Measured:
    """The figures of a measurement. rows: METRICS by task and method.

    differences: by task and method, the model's AUC minus the method's: value, low and high end of its interval. A
    figure that the labels do not define is NaN, such as the AUC where all labels are the same.
    """

    rows: dict[str, dict[str, dict[str, float]]]
    differences: dict[str, dict[str, tuple[float, float, float]]]


def bodies(catalog: Catalog, found: Requests, needs: Needs, max_history: int) -> Iterator[dict[str, Any]]:
    """Each request by the fields of /v1/rank that a model of these needs reads. An item shown twice is asked once.

    A model whose only contextual slot has values is given the scenario there, as `jgr train` does.
    """
    ids, (actions, _, times) = catalog.item_ids, feedback_of(found.histories)
    asked, scenarios = found.times.tolist(), found.scenarios.tolist()
    for i, (start, stop) in enumerate(zip(found.histories.starts, found.histories.stops, strict=True)):
        history = slice(max(start, stop - max_history), stop)
        shown = dict.fromkeys(found.histories.rows[found.places(i)].tolist())
        body: dict[str, Any] = {
            "history": [ids[row] for row in found.histories.rows[history]],
            "candidates": [ids[row] for row in shown],
            "priority": "batch",
        }
        if needs.timed:
            body |= {"history_times": times[history].tolist(), "time": asked[i]}
        if needs.actions:
            body["history_actions"] = actions[history].tolist()
        if needs.scenarios > 1 and scenarios[i] >= 0:  # else the log does not know it
            body["scenario"] = scenarios[i]
        if needs.slots and scenarios[i] >= 0:
            body["context"] = {"slot0": scenarios[i]}
        yield body


def ask(
    served: Served, catalog: Catalog, found: Requests, needs: Needs, on_answer: Callable[[], None]
) -> Float64:
    """Ask for the model's scores of the requests' impressions, [k, P] float64.

    on_answer: called after each answer, from any thread.
    """
    answers = served.rank_all(list(bodies(catalog, found, needs, served.info.max_history)), on_answer)
    scores = np.empty((len(found.shown), len(needs.tasks)))
    rows, at = found.rows.tolist(), 0
    for i, items in enumerate(answers):
        by_item = {item.item_id: item.scores or {needs.tasks[0]: item.score} for item in items}
        for row in rows[at : int(found.offsets[i + 1])]:
            scores[at] = [by_item[catalog.item_ids[row]][task] for task in needs.tasks]
            at += 1
    return scores


class Shares:
    """How often an action followed, by item, scenario and user: what the baselines are made of.

    bit: the action's bit. learnt: the requests of the training split.
    """

    def __init__(self, interactions: Interactions, learnt: Requests, bit: int) -> None:
        actions, scenarios, _ = feedback_of(learnt.histories)
        self._done = (actions >> bit & 1).astype(np.int64)
        known = recorded(interactions, actions)
        self._done_before = np.append(0, np.cumsum(np.where(known, self._done, 0)))
        self._shown_before = np.append(0, np.cumsum(known))
        self.labels = self._done[learnt.shown]
        self._rate = float(self.labels.mean())
        if not 0 < self._rate < 1:
            how = "always" if self._rate else "never"
            raise EvaluationError(
                f"{interactions.actions[bit]} {how} happens in training: the baselines cannot learn it, nor a model; "
                "train one without this task"
            )
        self._keys = (learnt.histories.rows, scenarios + 1)  # one that is not known, -1, is one of its own
        self._counts = []
        for key in self._keys:
            of, size = key[learnt.shown], int(key.max()) + 1
            self._counts.append((np.bincount(of, self.labels, size), np.bincount(of, minlength=size)))
        self.item_rates = self._shrunk(*self._counts[0])

    def _shrunk(self, done: npt.NDArray[Any], shown: npt.NDArray[Any]) -> Float64:
        found: Float64 = (done + PRIOR * self._rate) / (shown + PRIOR)
        return found

    def popularity(self, found: Requests) -> Float64:
        """The share of each impression's item, as its probability, [k] float64."""
        return self.item_rates[found.rows]

    def inputs(self, found: Requests, own: bool) -> Float64:
        """The inputs of the logistic regression, [k, 4]: 1, and the logits of the item's, the scenario's, the user's
        share.

        own: whether these impressions are the ones that were counted. Then each one's own outcome is left out of its
        shares, so that the regression does not see what it is to predict.
        """
        own_done = self._done[found.shown] if own else np.zeros(len(found.shown), np.int64)
        rates = []
        for key, (done, shown) in zip(self._keys, self._counts, strict=True):
            of = key[found.shown]
            rates.append(self._shrunk(done[of] - own_done, shown[of] - own))
        starts, stops, owner = found.histories.starts, found.histories.stops, found.owners
        counts = [sums[stops] - sums[starts] for sums in (self._done_before, self._shown_before)]
        rates.append(self._shrunk(*counts)[owner])
        logits = [np.log(rate / (1 - rate)) for rate in rates]
        return np.stack([np.ones(len(owner)), *logits], axis=1)


def fit_logistic(inputs: Float64, labels: Int64) -> Float64:
    """The weights of a logistic regression, by Newton's method. inputs: [k, f]. labels: [k]."""
    weights = np.zeros(inputs.shape[1])
    for _ in range(NEWTON_STEPS):
        p = sigmoid(inputs @ weights)
        gradient = inputs.T @ (p - labels) + RIDGE * weights
        curvature = (inputs * (p * (1 - p))[:, None]).T @ inputs + RIDGE * np.eye(len(weights))
        weights = weights - np.linalg.solve(curvature, gradient)
    return weights


def sigmoid(x: Float64) -> Float64:
    """1 / (1 + e^-x)."""
    found: Float64 = 1 / (1 + np.exp(-x))
    return found


def baselines(
    interactions: Interactions, found: Requests, tasks: tuple[str, ...]
) -> dict[str, npt.NDArray[np.float64]]:
    """Probabilities [k, P] by method, for the impressions of a split's requests."""
    learnt = requests(interactions, interactions.train)
    columns: dict[str, list[Float64]] = {"popularity": [], "logistic": []}
    for bit in action_bits(interactions, tasks, "tasks"):
        shares = Shares(interactions, learnt, bit)
        weights = fit_logistic(shares.inputs(learnt, own=True), shares.labels)
        columns["popularity"].append(shares.popularity(found))
        columns["logistic"].append(sigmoid(shares.inputs(found, own=False) @ weights))
    return {name: np.stack(of, axis=1) for name, of in columns.items()}


def measure(
    scores: Mapping[str, Float64],
    interactions: Interactions,
    found: Requests,
    tasks: tuple[str, ...],
    model: str,
    *,
    resamples: int = 0,
    seed: int = 0,
) -> Measured:
    """METRICS of every method's scores [k, P]. model: the method that the others are compared with.

    The intervals are of a bootstrap over users, of the resamples that have both labels.
    """
    users = found.users[found.owners]
    _, owner = np.unique(users, return_inverse=True)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    differences: dict[str, dict[str, tuple[float, float, float]]] = {}
    for at, (task, bit) in enumerate(zip(tasks, action_bits(interactions, tasks, "tasks"), strict=True)):
        labels = found.actions >> bit & 1
        rows[task] = {
            name: {
                "auc": auc(of[:, at], labels),
                "gauc": gauc(of[:, at], labels, users),
                "log_loss": log_loss(of[:, at], labels),
                "ne": normalised_entropy(of[:, at], labels),
            }
            for name, of in scores.items()
        }
        drawn = _resampled(
            {name: Areas(of[:, at], labels) for name, of in scores.items()}, owner, resamples, seed
        )
        differences[task] = {}
        for name in (other for other in scores if other != model and resamples):
            apart = drawn[model] - drawn[name]
            defined = apart[~np.isnan(apart), None]
            low, high = bootstrap.interval(defined) if len(defined) else ([np.nan], [np.nan])
            value = rows[task][model]["auc"] - rows[task][name]["auc"]
            differences[task][name] = (value, float(low[0]), float(high[0]))
    return Measured(rows, differences)


def _resampled(
    areas: Mapping[str, Areas], owner: Int64, resamples: int, seed: int
) -> dict[str, npt.NDArray[np.float64]]:
    """[r] AUCs by method, each of the users that one resample drew: the same for all methods."""
    rng, count = np.random.default_rng(seed), int(owner.max()) + 1
    drawn = {name: np.empty(resamples) for name in areas}
    for i in range(resamples):
        times = np.bincount(rng.integers(0, count, count), minlength=count)[owner]
        for name, area in areas.items():
            drawn[name][i] = area.weighted(times)
    return drawn


def lines(measured: Measured, model: str) -> list[str]:
    """A block for each task."""
    shown = []
    for task, rows in measured.rows.items():
        width = max(map(len, rows))
        shown += ["", f"{task:<{width}}" + "".join(f"  {metric:>8}" for metric in METRICS)]
        shown += [
            f"{name:<{width}}" + "".join(f"  {row[m]:8.4f}" for m in METRICS) for name, row in rows.items()
        ]
        shown += [
            f"auc of {model} - {name}: {value:+.4f} [{low:+.4f}, {high:+.4f}]"
            for name, (value, low, high) in sorted(measured.differences[task].items())
        ]
    return shown[1:]
