# SPDX-License-Identifier: Apache-2.0
"""Train a semantic-ID generator from a dataset, and leave a model folder that `jgr serve` takes as it is.

While it trains, train.out + ".training" holds what a killed run goes on from; its losses end in the model folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from jgr.catalog import save_catalog
from jgr.config import Config, ConfigError
from jgr.data.datasets import Dataset
from jgr.models import checkpoint
from jgr.prompt import PromptBuilder, level_tokens, semantic_id_tokenizer
from jgr.training.progress import RunFolder
from jgr.training.trainer import State, Windows, decoder_config, fit, initial_state

LOG_EVERY = 100  # steps; each log waits for the device

_log = logging.getLogger(__name__)


def train_generator(
    config: Config,
    dataset: Dataset,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Path:
    """Train on the dataset's training sequences and write train.out: weights, config, tokenizer, catalog, losses.

    progress(steps done, steps in all, loss). Goes on where an earlier, killed call with the same arguments stopped.
    Raises ConfigError where prompt and training do not fit.
    """
    train, prompt = config.train, config.prompt
    if not train.out:
        raise ConfigError("train.out: the folder for the model is not set")
    if not prompt.template.endswith("{history}") or prompt.item != "{sid}":
        raise ConfigError(
            "training needs prompts in which the next item's codes follow the history at once: "
            f"prompt.template ending in {{history}} and prompt.item={{sid}}, not {prompt.template!r}, {prompt.item!r}"
        )
    checkpoint.require_writable(Path(train.out))
    catalog = dataset.catalog
    tokenizer = semantic_id_tokenizer(catalog)
    prompts = PromptBuilder(prompt, tokenizer, catalog)
    tokens = level_tokens(catalog, tokenizer, tokenizer.vocab_size)
    item_tokens = np.stack([t[catalog.codes[:, level]] for level, t in enumerate(tokens)], axis=1)
    windows = Windows(list(dataset.interactions.sequences), prompts.prefix, item_tokens, train)
    # What is trained on is up to max_items + 1 items; what is served is at most the prompt and one item more.
    positions = max(windows.max_tokens, prompts.max_tokens + catalog.depth)
    model = decoder_config(train, tokenizer.vocab_size, positions)
    _log.info("training on %d users, %d steps an epoch", len(windows), windows.steps_per_epoch())

    running = Path(f"{train.out}.training")
    run = {
        "train": asdict(train),
        "prompt": asdict(prompt),
        "catalog_version": catalog.version,
        "windows": windows.digest(),
    }
    with RunFolder(running, run) as folder:

        def on_step(done: int, state: State, loss: jax.Array) -> None:
            folder.record(done, loss)
            if done % LOG_EVERY == 0 or done == train.steps:
                progress(done, train.steps, f"loss {float(loss):.3f}")
                _log.info("step %d of %d: loss %.4f", done, train.steps, float(loss))
            if done % train.checkpoint_every == 0 or done == train.steps:
                if not np.isfinite(float(loss)):
                    raise ConfigError(f"the loss of step {done} is {float(loss)}: lower train.learning_rate")
                folder.save(done, state)

        start = folder.latest(initial_state(train, model))
        if start is not None:
            _log.info("going on from step %d", int(start.step))
        params = fit(windows, train, model, on_step, start)

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")
        shutil.copy(running / "metrics.jsonl", folder)

    checkpoint.save(Path(train.out), model, params, write_beside)
    shutil.rmtree(running)
    return Path(train.out)
