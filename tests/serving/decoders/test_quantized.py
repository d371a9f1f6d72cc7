# SPDX-License-Identifier: Apache-2.0
"""A server whose weights are held in 8 bits: scores are those of weights that numpy rounded; what it tells of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.cache.memory import tree_bytes
from jgr.config import Config, ConfigError, override
from jgr.models import checkpoint
from jgr.models.decoder import DecoderParams
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine import weights
from jgr.serving.versions.loading import load_any
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = override(make_folder(tmp_path_factory.mktemp("models") / "m", depth=2), *FAST)
    served = Served(override(config, "model.quantize=int8"))
    yield served
    assert served.stop() == 0


def test_scores_are_those_of_weights_that_numpy_rounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, whole = history(0, 9), served.params
    assert isinstance(whole, DecoderParams)
    of_whole = served.likelihoods(rows)
    layers = dataclasses.replace(whole.layers, **{m: rounded(getattr(whole.layers, m)) for m in MATRICES})
    monkeypatch.setattr(served, "params", dataclasses.replace(whole, layers=layers))
    of_rounded = served.likelihoods(rows)
    for path, fields in (
        ("/v1/rank", {"candidates": [f"B{c:03}" for c in range(0, 60, 4)]}),
        ("/v1/recommend", {"top_k": 16, "beam_width": 16}),
    ):
        items = served.post(path, body(rows, **fields))["items"]
        found = [served.catalog.row(item["item_id"]) for item in items]
        assert len(found) >= 15
        np.testing.assert_allclose([item["score"] for item in items], of_rounded[found], atol=1e-4)
        assert np.abs(of_rounded[found] - of_whole[found]).max() > 1e-3, "the two can be told apart"


def test_the_model_says_how_its_weights_are_held(served: Served) -> None:
    found = served.client.models()[0]
    assert found.quantize == "int8"
    assert re.fullmatch("tiny@[0-9a-f]{8}-int8", found.version)


def test_weights_take_less_memory(served: Served) -> None:
    layers: Any = served.params.layers  # type: ignore[union-attr]
    matrices = sum(getattr(layers, m).nbytes for m in MATRICES)
    columns = sum(getattr(layers, m)[:, 0].nbytes for m in MATRICES)
    assert served.engine.memory["weights"] == tree_bytes(served.params) - matrices + matrices // 4 + columns


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
    held = set(weights._held)
    engines = [
        load_engine(override(config, *s)) for s in ((), ("model.quantize=fp8",), ("model.dtype=bfloat16",))
    ]
    assert len({tuple(arrays(engine)) for engine in engines}) == 3
    assert len({engine.memory["weights"] for engine in engines}) == 3
    added = set(weights._held) - held
    assert len(added) == 3
    del engines
    assert not added & set(weights._held)


def test_what_cannot_be_held_so_is_refused_at_the_start(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"model\.quantize"):
        override(config, "model.quantize=int4")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "sasrec"}')
    with pytest.raises(ConfigError, match=r"model\.quantize: scorers are served in float32"):
        load_any(override(config, "model.quantize=int8"))
