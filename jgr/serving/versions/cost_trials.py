# SPDX-License-Identifier: Apache-2.0
"""From a model folder to the runs that its cost model is fitted to: a decoder's or a scorer's (SIM-10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jgr.config import Config
from jgr.serving.decoders import cost_grid as decoder_grid
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.cost_profile import Trial
from jgr.serving.engine.opening import open_folder
from jgr.serving.scorers import cost_grid as scorer_grid
from jgr.serving.scorers.loading import load_scorer
from jgr.serving.versions.loading import is_scorer, own_settings

Compile = Callable[[Progress], Sequence[Trial]]


def load_trials(config: Config) -> tuple[str, Compile]:
    """The family of config.model, and what compiles its runs. Raises UserError where the model cannot be served so."""
    folder = open_folder(config)
    if not is_scorer(folder):
        executors = load_engine(own_settings(config)).served.executors
        assert isinstance(executors, DecoderExecutors)
        return executors.plain.model[0].family, partial(decoder_grid.trials, executors)
    model, settings = load_scorer(folder, config), config.executors
    largest = max(settings.sizes)
    return scorer_grid.family(model.cfg), lambda progress: scorer_grid.trials(
        model.cfg, model.params, largest, progress, settings.build
    )
