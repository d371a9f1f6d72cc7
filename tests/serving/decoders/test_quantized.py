# SPDX-License-Identifier: Apache-2.0
"""A server whose weights are held in 8 bits: scores are those of weights that numpy rounded; what it tells of them."""

from __future__ import annotations

import dataclasses
import gc
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import Config, ConfigError, override
from jgr.models import checkpoint
from jgr.models.decoder import DecoderParams
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine import weights
from tests.serving.decoders.test_model_server import Served, body, history
from tests.serving.tiny_model import make_folder

MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")
FAST = ("profiles.batch=1", "profiles.tokens=32", "profiles.widths=16", "profiles.candidates=16")


def rounded(w: Any) -> Any:
    """Matrices [L, D, F] with each column's numbers at a 127th of its largest one."""
    whole = np.asarray(w, np.float64)
    step = np.abs(whole).max(1, keepdims=True) / 127
    return jnp.asarray(np.round(whole / step) * step, jnp.float32)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """With model.quantize, and without it but with weights that were rounded beforehand."""
    place = tmp_path_factory.mktemp("models")
    config = override(make_folder(place / "whole"), *FAST)
    cfg, params = checkpoint.load(place / "whole")
    assert isinstance(params, DecoderParams)
    layers = dataclasses.replace(params.layers, **{m: rounded(getattr(params.layers, m)) for m in MATRICES})

    def write_beside(folder: Path) -> None:
        for name in ("tokenizer.json", "catalog.jsonl"):
            shutil.copy(place / "whole" / name, folder / name)

    checkpoint.save(place / "rounded", cfg, dataclasses.replace(params, layers=layers), write_beside)
    served = Served(override(config, "model.quantize=int8"))
    reference = Served(override(config, f"model.path={place / 'rounded'}"))
    yield served, reference
    assert served.stop() == reference.stop() == 0


def test_scores_are_those_of_weights_that_were_rounded_before(both: tuple[Served, Served]) -> None:
    rows, changes = history(0, 9), []
    for path, fields in (
        ("/v1/rank", {"candidates": [f"B{c:03}" for c in range(0, 60, 4)]}),
        ("/v1/recommend", {"top_k": 16, "beam_width": 16}),
    ):
        found, want = (served.post(path, body(rows, **fields))["items"] for served in both)
        scores = {item["item_id"]: item["score"] for item in want}
        assert {item["item_id"] for item in found} == scores.keys()
        for item in found:
            assert item["score"] == pytest.approx(scores[item["item_id"]], abs=1e-4)
        whole = both[0].likelihoods(rows)  # of the folder's own weights
        changes += [abs(item["score"] - whole[both[0].catalog.row(item["item_id"])]) for item in found]
    assert max(changes) > 1e-3  # so that the comparison above can fail


def test_the_model_says_how_its_weights_are_held(both: tuple[Served, Served]) -> None:
    found, want = (served.client.models()[0] for served in both)
    assert (found.quantize, want.quantize) == ("int8", "")
    assert re.fullmatch("tiny@[0-9a-f]{8}-int8", found.version)
    assert re.fullmatch("tiny@[0-9a-f]{8}", want.version)


def test_weights_take_less_memory(both: tuple[Served, Served]) -> None:
    small, whole = (served.engine.memory["weights"] for served in both)
    params = both[1].engine.served.executors.plain._params
    matrices = sum(getattr(params.layers, m).nbytes for m in MATRICES)
    columns = sum(getattr(params.layers, m)[:, 0].nbytes for m in MATRICES)
    assert small == whole - matrices + matrices // 4 + columns


def arrays(engine: Any) -> list[int]:
    return [id(x) for x in jax.tree.leaves(engine.served.executors.plain._params)]


def rebuilt(config: Config, change: str) -> Config:
    """The same configuration after a change in its folder or of a setting."""
    folder = Path(config.model.path)
    if change == "tokenizer":
        path = folder / "tokenizer.json"
        path.write_text(path.read_text() + " ")
        (folder / "digests.json").unlink()
    if change == "weights":
        cfg, params = checkpoint.load(folder)
        doubled = dataclasses.replace(params, embed=params.embed * 2)
        beside = {name: (folder / name).read_bytes() for name in ("tokenizer.json", "catalog.jsonl")}
        checkpoint.save(folder, cfg, doubled, lambda f: [(f / n).write_bytes(b) for n, b in beside.items()])  # type: ignore[arg-type,func-returns-value]
    return override(config, "prompt.max_items=5") if change == "setting" else config


@pytest.mark.parametrize(
    ("change", "shared"),
    [("nothing", True), ("tokenizer", True), ("setting", True), ("weights", False)],
)
def test_weights_that_did_not_change_are_in_memory_once(change: str, shared: bool, tmp_path: Path) -> None:
    config = override(make_folder(tmp_path / "m"), *FAST, "model.quantize=int8")
    first = load_engine(config)
    before, size = sum(x.nbytes for x in jax.live_arrays()), first.memory["weights"]
    tables = first.memory["catalog"]
    second = load_engine(rebuilt(config, change))
    more = sum(x.nbytes for x in jax.live_arrays()) - before
    assert (arrays(first) == arrays(second)) == shared
    assert more == tables + (0 if shared else size)
    assert (first.info.version == second.info.version) == (change in ("nothing", "setting"))


def test_other_forms_of_the_same_weights_are_not_shared_and_nothing_outlives_its_engines(
    tmp_path: Path,
) -> None:
    config = override(make_folder(tmp_path / "m"), *FAST)
    gc.collect()
    held = len(weights._held)
    engines = [
        load_engine(override(config, *s)) for s in ((), ("model.quantize=fp8",), ("model.dtype=bfloat16",))
    ]
    assert len({tuple(arrays(engine)) for engine in engines}) == 3
    assert len({engine.memory["weights"] for engine in engines}) == 3
    assert len(weights._held) == held + 3
    del engines
    gc.collect()
    assert len(weights._held) == held


def test_what_cannot_be_held_so_is_refused_at_the_start(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"model\.quantize"):
        override(config, "model.quantize=int4")
