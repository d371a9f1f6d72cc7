# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are shared by all engines of equal shapes, and freed with the last one, without the collector."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, UserError, override
from jgr.models import params, sasrec, scorers
from jgr.models.retrievers import items_digest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine import compilation
from jgr.serving.engine.compilation import CompilationCounter, check_scores, compiled
from jgr.serving.scorers.loading import load_scorer_engine
from tests.serving.tiny_model import make_folder

pytestmark = pytest.mark.usefixtures("without_collector")


def quiet(done: int, total: int, label: str) -> None:
    pass


def warm(engine: Any) -> Any:
    engine.served.executors.warm_up(quiet)
    return engine


def compilations(counter: CompilationCounter) -> int:
    return sum(counter.counts.values())


def catalog_of(items: int) -> Catalog:
    codes = np.random.default_rng(items).integers(0, 5, (items, 3))
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    return Catalog.build([f"B{i:04}" for i in range(items)], symbols, [{}] * items)


@partial(jax.jit, static_argnames="times")
def _scaled(x: jax.Array, *, times: int) -> jax.Array:
    return x * times


def test_a_program_is_shared_while_somebody_holds_it() -> None:
    four, held = jnp.zeros(4), len(compilation._programs)
    program = compiled(_scaled, four, times=3)
    np.testing.assert_array_equal(program(np.arange(4, dtype=np.float32)), [0, 3, 6, 9])
    assert compiled(_scaled, jnp.ones(4), times=3) is program
    assert compiled(_scaled, four, times=2) is not program
    assert compiled(_scaled, jnp.zeros(5), times=3) is not program
    assert compiled(_scaled, four, times=3, key="another") is not program
    assert len(compilation._programs) == held + 1, "the others went with those who asked"
    del program
    assert len(compilation._programs) == held


def test_catalogs_of_ever_new_sizes_leave_no_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = override(
        make_folder(tmp_path / "m", layers=1), "profiles.batch=2", "profiles.tokens=32", "profiles.widths=8"
    )
    held = len(compilation._programs)
    with caplog.at_level(logging.INFO, "jgr.serving"):
        engine = warm(load_engine(override(config, "model.compilation_cache=")))
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith(" items; 2 shapes") and said[-1] == "2 programs were compiled or read from disk"
    own = len(compilation._programs) - held
    live = len(jax.devices()[0].client.live_executables())
    assert own == 2, "recommend and rank"
    kinds, counts = set(), []
    for items in (110, 60, 110):
        engine = warm(engine.rebuild.engine(catalog_of(items)))
        tables = engine.served.executors.plain._tables
        kinds.add(tuple(x.shape for x in jax.tree.leaves(tables)))
        assert len(compilation._programs) - held == own
        counts.append(len(jax.devices()[0].client.live_executables()))
    assert len(kinds) == 2, "the catalogs are of several growth classes"
    assert counts[-1] == counts[0] <= live + 4 * len(kinds), "only what makes tables of a new size stays"
    del engine, tables
    assert len(compilation._programs) == held


def test_a_reload_of_a_scorer_of_the_same_shapes_compiles_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = catalog_of(12)
    cfg = sasrec.SasrecConfig(12, 8, 16, 1, 1, 16, items_digest(catalog.item_ids))
    for seed in (1, 2):
        drawn = params.initialize(sasrec.spec(cfg), jax.random.key(seed))
        scorers.save(tmp_path / str(seed), cfg, drawn, lambda f: save_catalog(catalog, f / "catalog.jsonl"))
    config = override(Config(), "executors.sizes=4,8", "model.compilation_cache=", "server.port=0")
    first = warm(load_scorer_engine(override(config, f"model.path={tmp_path / '1'}")))
    counter = CompilationCounter()
    with caplog.at_level(logging.INFO, "jgr.serving"):
        second = warm(load_scorer_engine(override(config, f"model.path={tmp_path / '2'}")))
    assert compilations(counter) == 0
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith("; 3 shapes") and said[-1] == "no programs were compiled or read from disk"
    one, other = (engine.served.executors.programs for engine in (first, second))
    assert one[4] is other[4] and one.params is not other.params
    held = len(compilation._programs)
    del first, one
    assert len(compilation._programs) == held, "the second runs them"
    del second, other
    assert len(compilation._programs) < held


@pytest.mark.parametrize("bad", [[1.0, np.nan], [1.0, np.inf], [-np.inf], []])
def test_scores_of_a_probe_must_be_finite_but_for_dead_beams(bad: list[float]) -> None:
    check_scores("rank", [1.0, -np.inf])
    with pytest.raises(UserError, match="rank gives scores that are no finite numbers"):
        check_scores("rank", bad)


def test_a_scorer_with_overflowing_weights_is_refused_at_its_warm_up(tmp_path: Path) -> None:
    catalog = catalog_of(12)
    cfg = sasrec.SasrecConfig(12, 8, 16, 1, 1, 16, items_digest(catalog.item_ids))
    drawn = params.initialize(sasrec.spec(cfg), jax.random.key(0))
    loud = jax.tree.map(lambda x: jnp.full_like(x, 3e38), drawn)
    scorers.save(tmp_path / "m", cfg, loud, lambda f: save_catalog(catalog, f / "catalog.jsonl"))
    config = override(Config(), f"model.path={tmp_path / 'm'}", "executors.sizes=4", "server.port=0")
    with pytest.raises(UserError, match="rank of 4 candidates gives scores that are no finite numbers"):
        warm(load_scorer_engine(override(config, "model.compilation_cache=")))
