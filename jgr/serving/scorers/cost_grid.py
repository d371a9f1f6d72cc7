# SPDX-License-Identifier: Apache-2.0
"""The runs that a scorer's cost model is fitted to: parts of other sizes, after histories of other lengths (SIM-10).

Kinds of work are `user`, what is computed of a user alone; `part`, candidates for a user that is there; and `whole`,
both in one program. Programs are compiled for a history's most events and computed for all of them, so shorter
histories are models of the same weights whose windows are shorter. Candidates have no features, and no users are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgr.models import scorer_costs
from jgr.models.climber import ClimberConfig
from jgr.models.climber_layers import Build
from jgr.models.costs import Cost
from jgr.models.hstu import HstuConfig
from jgr.models.lru_rec import LruRecConfig
from jgr.models.params import PyTree, Spec
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorer_costs import Work
from jgr.models.scorers import ScorerConfig, scorer
from jgr.models.stu_scorer import StuScorerConfig
from jgr.serving.engine.compilation import preparing
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.cost_profile import Trial, choose, spaced
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers.executors import Executor, PartWork, Programs, ReadWork
from jgr.serving.scorers.user_block import new_block

MOST_PROGRAMS = 18
"""The most programs that compute candidates of a user that is there; there are as many again that compute both."""
HISTORIES, SIZES = 7, 6

_COSTS: Mapping[type, Callable[[Any, Work], Cost]] = {
    SasrecConfig: scorer_costs.sasrec,
    LruRecConfig: scorer_costs.lru_rec,
    HstuConfig: scorer_costs.hstu,
    StuScorerConfig: scorer_costs.stu,
    ClimberConfig: scorer_costs.climber,
}


def cost(cfg: ScorerConfig, work: Work) -> Cost:
    """What a part of a request costs."""
    return _COSTS[type(cfg)](cfg, work)


def family(cfg: ScorerConfig) -> str:
    """The name of a config's family."""
    return _COSTS[type(cfg)].__name__


def with_history(cfg: ScorerConfig, params: PyTree, events: int) -> tuple[ScorerConfig, PyTree]:
    """The model with histories of at most `events`. Tables whose size follows from that, as those of positions, are
    zeros: it takes as long as one that was trained so, and its scores mean nothing."""
    if isinstance(cfg, HstuConfig):
        other: ScorerConfig = replace(cfg, max_items=events, length=cfg.length - cfg.max_items + events)
    else:
        other = replace(cfg, max_items=events)

    def fitting(declared: Spec, own: Any) -> Any:
        return own if own.shape == declared.shape else jnp.zeros(declared.shape, own.dtype)

    specs = scorer(other).spec(other)
    return other, jax.tree.map(fitting, specs, params, is_leaf=lambda x: isinstance(x, Spec))


@preparing()
def trials(
    cfg: ScorerConfig,
    params: PyTree,
    largest: int,
    progress: Progress,
    build: Build = "fused",
    most: int = MOST_PROGRAMS,
) -> list[Trial]:
    """Compile programs for parts of up to `largest` candidates, and give the runs to time. params: as `scorers.load`
    gives them."""
    unit = cfg.blocks if isinstance(cfg, ClimberConfig) else 1
    histories = _between(spaced(cfg.max_items, HISTORIES // 2 + 1, unit, unit), unit)
    sizes = _between(spaced(largest, SIZES // 2 + 1), 1)
    chosen = choose((histories, sizes), most)
    found: list[Trial] = []
    for done, events in enumerate(histories, 1):
        own = [size for at, size in chosen if at == events]
        found += _of_history(*with_history(cfg, params, events), own, build)
        progress(done, len(histories), f"histories of {events} events")
    return found


def _between(values: Sequence[int], unit: int) -> tuple[int, ...]:
    """The values, and one between each and the next."""
    middles = {(low + high) // 2 // unit * unit for low, high in itertools.pairwise(values)}
    return tuple(sorted({*values, *middles}))


def _of_history(cfg: ScorerConfig, params: PyTree, sizes: Sequence[int], build: Build) -> list[Trial]:
    programs = Programs(cfg, params, sizes, "request", None, build=build, lengths=(cfg.max_items,))
    for size in (USER_PART, *sizes):
        programs.compile(size)
    block, views = new_block(programs.user)
    views["rows"][:] = 0  # a full history: attention may skip what is not there
    events = f"{cfg.max_items} events"
    reader, read = Executor(programs, USER_PART, None), ReadWork(block)
    found = [_trial("user", events, reader, read, cost(cfg, Work(True, 0)))]
    state = reader.run(read).state
    for size in sizes:
        part = PartWork(np.zeros(size, np.int32), state)
        label = f"{size} candidates, {events}"
        for kind, work in (("part", part), ("whole", replace(part, user=block))):
            executor = Executor(programs, size, None)
            found.append(_trial(kind, label, executor, work, cost(cfg, Work(kind == "whole", size))))
    return found


def _trial(kind: str, label: str, executor: Executor, work: ReadWork | PartWork, counted: Cost) -> Trial:
    return Trial(kind, label, counted, 1, partial(executor.launch, work), partial(executor.collect, work))
