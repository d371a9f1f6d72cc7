# SPDX-License-Identifier: Apache-2.0
"""From a configuration to an engine with a model behind it: read, check that the parts fit, place on the device.

A model is read once; engines over different catalogs share its weights, and its compiled programs where the catalogs'
tables are of one growth class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jgr.cache.memory import Memory, tree_bytes
from jgr.catalog.catalog import Catalog
from jgr.catalog.item_filters import catalog_segments
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, ConfigError
from jgr.models import checkpoint
from jgr.models.beam import CatalogTables, catalog_tables
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.devices import ONE, Devices
from jgr.models.generators import GeneratorConfig, GeneratorParams, generator, laid_out
from jgr.models.model_files import ModelFiles
from jgr.models.quantize import kind_of, versioned
from jgr.models.replicated import Replicated
from jgr.ops import native
from jgr.prompt.candidates import SegmentPrompts
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens
from jgr.serving.decoders.caching import (
    copies_items,
    kv_cells,
    make_caching,
    rank_profiles,
    recommend_profiles,
)
from jgr.serving.decoders.library import Library, LibraryLoader
from jgr.serving.decoders.paged_executor import DecoderExecutors, PagedExecutor
from jgr.serving.decoders.parted_executor import PartedExecutor
from jgr.serving.decoders.reading import TextReader
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.serve import ServedDecoder, decoder_engine
from jgr.serving.engine.compilation import preparing
from jgr.serving.engine.engine import Engine, Rebuild
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.opening import Again, counting_metrics, open_folder, read_catalog
from jgr.serving.engine.weights import Weights, once
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import KINDS, Kind, Profile
from jgr.serving.policies.sources import Repair

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Model:
    """A model in memory, and what it was loaded for. kinds: of the requests that it answers."""

    weights: Weights[GeneratorConfig, GeneratorParams]
    tokenizer: Tokenizer | None
    revision: str
    folder: Path
    profiles: tuple[Profile, ...]
    files: ModelFiles | None = None
    kinds: Sequence[Kind] = KINDS

    @property
    def cfg(self) -> GeneratorConfig:
        return self.weights.cfg

    @property
    def params(self) -> GeneratorParams:
        return self.weights.params


class Fitted(NamedTuple):
    """The parts of an engine that are made from a catalog that fits its model."""

    tokens: tuple[npt.NDArray[np.int32], ...]
    prompts: PromptBuilder
    segments: SegmentPrompts | None
    has_segments: bool


@preparing()
def load_engine(
    config: Config,
    metrics: Metrics | None = None,
    memory: Memory | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> Engine[ServedDecoder]:
    """The engine that serves config.model over config.catalog, not yet started.

    metrics, memory: of the server that it joins. kinds: of the requests that it is to answer, one at least; for others
    no programs are compiled.

    The tokenizer is the model folder's tokenizer.json, where it has one; the catalog is config.catalog.path, else
    the model folder's catalog.jsonl. Raises a UserError that names what is missing or does not fit: the folder, the
    weights, a semantic id's token that the model's vocabulary lacks, a prompt that no profile takes.
    """
    folder = open_folder(config)
    memory = memory or Memory.of(config)
    model = _load_model(folder, config, memory.devices_of(config), kinds)
    catalog = read_catalog(folder, config)
    return make_engine(model, config, catalog, metrics or counting_metrics(), memory)


def _load_model(folder: Path, config: Config, devices: Devices, kinds: Sequence[Kind]) -> Model:
    files, kind = ModelFiles(folder), config.model.quantize
    dtype = checkpoint.served_dtype(folder, config.model.dtype)
    if isinstance(devices, Replicated):
        _check_parallel(config)

    def read() -> tuple[GeneratorConfig, GeneratorParams]:
        if isinstance(devices, Replicated):
            cfg, params = checkpoint.load(folder, dtype, files, ONE, kind)
            return cfg, devices.place(laid_out(params))
        cfg, params = checkpoint.load(folder, dtype, files, devices, kind)
        return cfg, laid_out(params, devices.count)

    checkpoint.require_size(folder, files)  # before `once` hashes them
    weights = once(files, ("generator", dtype, kind, devices, native.in_use()), read)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(path) if path.exists() else None
    profiles = make_profiles(config.profiles, kinds)
    revision = versioned(files.revision(), kind)
    return Model(weights, tokenizer, revision, folder, profiles, files, kinds)


@preparing()
def make_engine(
    model: Model,
    config: Config,
    catalog: Catalog,
    metrics: Metrics,
    memory: Memory,
    like: DecoderExecutors | None = None,
) -> Engine[ServedDecoder]:
    """An engine for a catalog, not yet started. like: an executor of the model, whose programs are used if they fit.

    UserError where the catalog does not fit the model.
    """
    fitted = _fit(model, config, catalog)
    tree = PrefixTree.build(catalog.codes)
    devices = memory.devices_of(config)
    tables = catalog_tables(tree, fitted.tokens, model.params, growing=True, devices=devices)
    largest_batch = max(profile.batch for profile in model.profiles) * config.data_parallel.devices
    segment_rows = max(config.catalog.segment_rows, largest_batch) if fitted.has_segments else 0
    if like is not None:
        executor = like.over(tables, segment_rows)
    else:
        executor = _make_executors(model, config, tables, segment_rows, fitted.prompts, memory)
    _log.info(
        "model %s@%s: %s, %d layers, hidden %d, in %s, on %d x %s by %s; catalog %s: %d items; %d shapes",
        config.model.name,
        model.revision,
        model.cfg.family,
        model.cfg.layers,
        model.cfg.hidden,
        kind_of(model.params) or model.params.output_rows.dtype.name,
        devices.count,
        jax.devices()[0].device_kind,
        native.describe(),
        catalog.version,
        catalog.n_items,
        len(executor.profiles),
    )
    paged, caching, loader = executor.paged, None, None
    if paged is not None:
        loader, given = paged.library, (paged.kv, paged.profiles, fitted.segments, paged.library)
        caching = make_caching(config, memory, model.revision, *given)
    with ExitStack() as undo:
        if caching is not None:
            undo.callback(caching.close)  # where no engine is made after all
        engine = decoder_engine(
            config.model.name,
            catalog,
            tree,
            fitted.prompts,
            executor,
            config,
            metrics=metrics,
            revision=model.revision,
            quantize=kind_of(model.params),
            rebuild=Rebuild(
                partial(_fit, model, config),
                partial(make_engine, model, config, metrics=metrics, memory=memory, like=executor),
                Again.of(
                    f"{config.model.name}@{model.revision}",
                    model.files,
                    model.folder,
                    config,
                    partial(load_engine, memory=memory, kinds=model.kinds),
                ),
            ),
            caching=caching,
            memory={
                "weights": config.data_parallel.devices * tree_bytes(model.params),
                "catalog": config.data_parallel.devices * tree_bytes(tables),
                "items": tree.nbytes + getattr(catalog.item_ids, "nbytes", 0),
                "buffers": executor.buffer_bytes,
                **memory.parts(config.model.name),
            },
            reader=TextReader(
                model.tokenizer,
                fitted.prompts.review_tokens,
                max_bytes=config.server.max_text_bytes,
                max_waiting=config.batching.max_queue,
                library=None if loader is None else loader.library,
            ),
        )
        undo.pop_all()
    return engine


def _make_executors(
    model: Model,
    config: Config,
    tables: CatalogTables,
    segment_rows: int,
    prompts: PromptBuilder,
    memory: Memory,
) -> DecoderExecutors:
    """Prompts with candidates in them, and with a cache all that generate, are packed; the others have a row each."""
    longest = prompts.max_tokens
    settings = _settings(config, segment_rows)
    packed: list[Profile] = []
    if isinstance(model.cfg, DecoderConfig):
        if config.rank.method != "likelihood" and "rank" in model.kinds:
            packed += rank_profiles(config)
        if config.cache.policy != "none" and "recommend" in model.kinds:
            packed += recommend_profiles(config, longest)
    kinds = {profile.kind for profile in packed}
    plain = tuple(profile for profile in model.profiles if profile.kind not in kinds)
    for profile in plain:
        if profile.batch % config.data_parallel.devices:
            raise ConfigError(
                f"profiles.batch: {profile.batch} rows do not divide over {config.data_parallel.devices} devices "
                "(data_parallel.devices)"
            )
    paged = None
    if packed and isinstance(model.cfg, DecoderConfig) and isinstance(model.params, DecoderParams):
        dtype = np.dtype(model.params.embed.dtype)
        pool, reads = memory.pool, memory.reads
        kv = kv_cells(
            config.cache, model.cfg, dtype.name, dtype.itemsize, pool.page_bytes, config.model.tensor_parallel
        )
        loader = None
        if config.cache.library:
            given = (config.cache, model.params, model.cfg, model.revision, prompts.prefix)
            loader = LibraryLoader(Library(*given), kv)
        make: Callable[..., PagedExecutor] = PagedExecutor
        if reads is not None:
            make = partial(PartedExecutor, reads=reads, copies=copies_items(config))
        paged = make(
            model.cfg,
            model.params,
            tables,
            tuple(packed),
            pool,
            kv,
            longest,
            config.beam.normalize,
            repair=Repair.of(config.cache),
            chosen_by=config.cache.repair_by,
            moves=config.cache.policy == "blocks",
            lists=config.rank.method == "list_generation",
            host=memory.host,
            library=loader,
            explains=config.server.explain,
            **settings,
        )
    return DecoderExecutors(
        RowExecutor(
            model.cfg,
            model.params,
            tables,
            plain,
            config.beam.normalize,
            explains=config.server.explain,
            devices=memory.devices_of(config),
            **settings,
        ),
        paged,
        lanes=config.batching.streams,
        in_flight=config.batching.in_flight,
    )


def _settings(config: Config, segment_rows: int) -> dict[str, int]:
    return {
        "approximate": config.beam.approximate,
        "listed": config.server.max_history + config.server.max_filter_items,
        "segment_rows": segment_rows,
    }


def _fit(model: Model, config: Config, catalog: Catalog) -> Fitted:
    """UserError where the model cannot serve the catalog."""
    tokens = level_tokens(catalog, model.tokenizer, model.cfg.vocab_size)
    prompts = PromptBuilder(config.prompt, model.tokenizer, catalog)
    if prompts.largest_token >= model.cfg.vocab_size:
        raise ConfigError(
            f"prompt: token {prompts.largest_token} is not in the model's vocabulary of {model.cfg.vocab_size}"
        )
    misfit = generator(model.cfg).misfit(model.cfg, config.prompt, tokens)
    if misfit:
        raise ConfigError(f"{model.folder}: {misfit}")
    segments = None
    needs_decoder = config.rank.method != "likelihood" or config.cache.policy != "none"
    if needs_decoder and not isinstance(model.cfg, DecoderConfig):
        raise ConfigError(
            f"{model.folder}: a model of family {model.cfg.family} takes rank.method=likelihood and cache.policy=none"
        )
    if config.cache.library:
        _check_library(config, prompts)
    if config.cache.repair_share and model.cfg.layers < 2:
        raise ConfigError("cache.repair_share: a model of one layer has nothing to repair")
    if config.rank.method != "likelihood":
        segments = SegmentPrompts(config.rank, model.tokenizer, catalog, model.cfg.max_position)
        if segments.largest_token >= model.cfg.vocab_size:
            raise ConfigError(
                f"rank: token {segments.largest_token} is not in the vocabulary of {model.cfg.vocab_size}"
            )
    _check_lengths(config, prompts, catalog, segments, model)
    return Fitted(tokens, prompts, segments, bool(catalog_segments(catalog, config.catalog.segments)))


def _check_parallel(config: Config) -> None:
    """ConfigError where devices cannot part the requests of a model."""
    cache = config.cache
    beside = {
        "cache.host_mb": cache.host_mb > 0,
        "cache.kv": bool(cache.kv),
        "cache.library": bool(cache.library),
        "fleet.items": config.fleet.items != "none",
        "server.journal": bool(config.server.journal),
    }
    for name, used in beside.items():
        if used:
            raise ConfigError(f"{name}: is for one device, not for data_parallel.devices")


def _check_library(config: Config, prompts: PromptBuilder) -> None:
    """ConfigError where no prompt reads the library."""
    if config.cache.policy != "blocks" or config.rank.method == "likelihood":
        raise ConfigError(
            "cache.library: needs cache.policy=blocks, and a rank.method with candidates in the prompt"
        )
    if not prompts.review_tokens:
        raise ConfigError("cache.library: needs {review} in prompt.item, where the texts of a history stand")
    if config.server.journal:
        raise ConfigError("server.journal: cannot be replayed with cache.library, which stands in the pool")


def _check_lengths(
    config: Config, prompts: PromptBuilder, catalog: Catalog, segments: SegmentPrompts | None, model: Model
) -> None:
    """ConfigError where no prompt fits a profile, or a profile does not fit the model; a warning for the rest."""
    field, longest = "profiles.tokens", max(profile.tokens for profile in model.profiles)
    if (
        config.cache.policy != "none"
    ):  # what is cached now may not be then: a prompt must fit with nothing of it
        field, longest = "rank.tokens", max(longest, *config.rank.tokens)
    if prompts.max_tokens > longest:
        shortest = len(prompts.prefix) + prompts.min_item_tokens + len(prompts.suffix)
        if shortest > longest:
            raise ConfigError(
                f"{field}: the largest is {longest}, a prompt of one item has at least {shortest} tokens"
            )
        _log.warning(
            "a prompt of prompt.max_items=%d items can have %d tokens, the largest of %s is %d: "
            "requests beyond it are refused",
            config.prompt.max_items,
            prompts.max_tokens,
            field,
            longest,
        )
    following = catalog.depth
    if segments is not None:
        following = max(following, config.rank.item_span + len(segments.instruction) + len(segments.probe))
    positions = min(prompts.max_tokens, longest) + following
    if positions > model.cfg.max_position:
        raise ConfigError(
            f"prompt.max_items: a prompt and what follows it can need {positions} positions, "
            f"the model was made for {model.cfg.max_position}"
        )
