# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an engine with a model behind it: read, check that the parts fit, place on the device."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

from jgr.catalog import Catalog, load_catalog
from jgr.config import Config, ConfigError
from jgr.data.prefix_tree import PrefixTree
from jgr.models import checkpoint
from jgr.models.beam import catalog_tables
from jgr.prompt import PromptBuilder, Tokenizer, level_tokens
from jgr.serving.compilation import CompilationCounter, preparing, use_compilation_cache
from jgr.serving.engine import Engine
from jgr.serving.executors import JaxExecutor
from jgr.serving.metrics import Metrics
from jgr.serving.model_files import ModelFiles
from jgr.serving.policies.batching import Profile, make_profiles

_log = logging.getLogger(__name__)


@preparing()
def load_engine(config: Config, metrics: Metrics | None = None) -> Engine:
    """The engine that serves config.model over config.catalog, not yet started. metrics: of the server it joins.

    The tokenizer is the model folder's tokenizer.json, where it has one; the catalog is config.catalog.path, else
    the model folder's catalog.jsonl. Raises a UserError that names what is missing or does not fit: the folder, the
    weights, a semantic id's token that the model's vocabulary lacks, a prompt that no profile takes.
    """
    if not config.model.path:
        raise ConfigError("model.path: the folder of the model is not set")
    try:
        device = jax.devices()[0]
    except RuntimeError as error:  # the backend that JAX_PLATFORMS names is not there
        raise ConfigError(f"there is no device to serve on: {error}") from None
    if config.model.compilation_cache:
        use_compilation_cache(Path(os.path.expanduser(config.model.compilation_cache)))
    folder = Path(config.model.path).resolve()  # a link that is switched from here on does not mix two models
    files = ModelFiles(folder)
    cfg, params = checkpoint.load(folder, config.model.dtype)
    catalog = load_catalog(config.catalog.path or folder / "catalog.jsonl")
    tokenizer = (
        Tokenizer.from_file(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    )
    tokens = level_tokens(catalog, tokenizer, cfg.vocab_size)
    prompts = PromptBuilder(config.prompt, tokenizer, catalog)
    if prompts.largest_token >= cfg.vocab_size:
        raise ConfigError(
            f"prompt: token {prompts.largest_token} is not in the model's vocabulary of {cfg.vocab_size}"
        )
    profiles = make_profiles(config.profiles)
    _check_lengths(config, prompts, catalog, profiles, cfg.max_position)
    tree = PrefixTree.build(catalog.codes)
    revision = files.revision()
    _log.info(
        "model %s@%s: %s, %d layers, hidden %d, on %s; catalog %s: %d items; %d programs to compile",
        config.model.name,
        revision,
        cfg.family,
        cfg.layers,
        cfg.hidden,
        device.device_kind,
        catalog.version,
        catalog.n_items,
        len(profiles),
    )
    largest_batch = max(profile.batch for profile in profiles)
    executor = JaxExecutor(
        cfg,
        params,
        catalog_tables(tree, tokens, params),
        profiles,
        config.beam.normalize,
        approximate=config.beam.approximate,
        listed=config.server.max_history + config.server.max_filter_items,
        segment_rows=max(config.catalog.segment_rows, largest_batch)
        if any(config.catalog.segments in metadata for metadata in catalog.metadata)
        else 0,
    )
    if metrics is None:
        counter = CompilationCounter()
        metrics = Metrics(lambda: counter.counts)
    return Engine(
        config.model.name, catalog, tree, prompts, executor, config, metrics=metrics, revision=revision
    )


def _check_lengths(
    config: Config,
    prompts: PromptBuilder,
    catalog: Catalog,
    profiles: tuple[Profile, ...],
    max_position: int,
) -> None:
    """ConfigError where no prompt fits a profile, or a profile does not fit the model; a warning for the rest."""
    longest = max(profile.tokens for profile in profiles)
    if prompts.max_tokens > longest:
        shortest_item = min(len(prompts.item_tokens(row)) for row in range(catalog.n_items))
        shortest = len(prompts.prefix) + shortest_item + len(prompts.suffix)
        if shortest > longest:
            raise ConfigError(
                f"profiles.tokens: the largest is {longest}, a prompt of one item has at least {shortest} tokens"
            )
        _log.warning(
            "a prompt of prompt.max_items=%d items can have %d tokens, the largest profile takes %d: "
            "requests beyond it are refused",
            config.prompt.max_items,
            prompts.max_tokens,
            longest,
        )
    positions = min(prompts.max_tokens, longest) + catalog.depth
    if positions > max_position:
        raise ConfigError(
            f"prompt.max_items: a prompt and an item can need {positions} positions, "
            f"the model was made for {max_position}"
        )
