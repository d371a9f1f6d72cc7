# SPDX-License-Identifier: Apache-2.0
"""Several devices share one model: answers are one device's, two sums a layer, and what does not divide is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jgr.config import Config, ConfigError, override
from jgr.models.decoder import DecoderConfig
from jgr.models.devices import Devices, Placement, of_generator
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.params import Spec
from jgr.ops import split
from jgr.serving.cluster.replica import Source
from jgr.serving.versions.loading import load_any
from tests.serving.tiny_model import make_folder

MODELS = {"ranker": 8, "llama": 4, "onerec": 2, "hstu": 2, "sasrec": 4}
"""The models of over_devices.py, and on how many devices each is asked beside one."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What over_devices.py printed: by model and number of devices."""
    # NPROC: what the server sets by itself is too late where the backend runs already.
    environment = {**os.environ, "PYTHONPATH": ".", "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    # A busy machine may keep a device waiting for the others for longer than the 40 s after which XLA gives up.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {patient}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.decoders.over_devices", str(tmp_path_factory.mktemp("models"))],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("model", MODELS)
def test_answers_of_several_devices_are_those_of_one(ran: dict[str, dict[str, Any]], model: str) -> None:
    """Alone and in a batch, filtered, ranked; from a cold cache, from a warm one and after a history grew."""
    one, several = ran[model]["1"], ran[model][str(MODELS[model])]
    assert one["scores"].keys() == several["scores"].keys()
    for name, expected in one["scores"].items():
        found = several["scores"][name]
        assert [item for item, _ in found] == [item for item, _ in expected], name
        scores = [score for _, score in expected]
        assert len(set(scores)) > 1, name
        np.testing.assert_allclose([score for _, score in found], scores, atol=1e-4, rtol=0, err_msg=name)


def test_the_cache_of_several_devices_has_what_that_of_one_has(ran: dict[str, dict[str, Any]]) -> None:
    one, several = (ran["ranker"][count]["cached_tokens"] for count in ("1", "8"))
    assert one == several
    assert one[0] == 0 < min(one[3:])  # the first user comes to an empty cache, all come a second time


@pytest.mark.parametrize("model", MODELS)
def test_no_request_compiles(ran: dict[str, dict[str, Any]], model: str) -> None:
    assert [run["compiled"] for run in ran[model].values()] == [["0.0"], ["0.0"]]


@pytest.mark.parametrize(("model", "bodies"), [("ranker", [2, 2]), ("llama", [3, 3])])
def test_a_layer_is_two_sums_over_the_devices(
    ran: dict[str, dict[str, Any]], model: str, bodies: list[int]
) -> None:
    """bodies: how often a program has the code of a layer: the prompt's layers, its last one, and those of each level
    after the first."""
    programs = ran[model][str(MODELS[model])]["sums"]
    assert [one.pop("all-reduce attention") for one in programs] == bodies
    assert [one.pop("all-reduce mlp") for one in programs] == bodies
    # Besides: rows of tables, and what the log-softmax over the whole vocabulary needs.
    assert not any(kind.endswith(("attention", "mlp")) for one in programs for kind in one)
    assert not any(kind.startswith(("all-to-all", "collective-permute")) for one in programs for kind in one)
    assert all(not one for one in ran[model]["1"]["sums"])


@pytest.mark.parametrize("model", ["ranker", "llama", "onerec"])
def test_a_device_has_its_part_of_the_weights(ran: dict[str, dict[str, Any]], model: str) -> None:
    """Besides the norms, OneRec's tensors of the history, and copies of key/value heads (ranker: 8 for 4)."""
    assert ran[model]["1"]["share"] == 1
    whole = MODELS[model] * ran[model][str(MODELS[model])]["share"]
    assert 1 <= whole < 1.2


def test_weights_in_8_bits_are_divided_as_others(ran: dict[str, dict[str, Any]]) -> None:
    """Factors of a matrix that is divided by rows are on every device, and are applied to the devices' sum."""
    one, several = ran["in 8 bits"]["1"], ran["in 8 bits"]["4"]
    assert np.ptp(one["logits"]) > 1
    np.testing.assert_allclose(several["logits"], one["logits"], atol=1e-4, rtol=0)
    assert (one["share"], several["share"]) == (1, 0.25)
    # Two for each copy of a layer's code, the last layer's and the others'; one for the table of tokens, and one that
    # brings the logits together.
    assert (one["sums"], several["sums"]) == (0, 6)


def _devices(count: int) -> Any:
    return Devices(AbstractMesh((count,), (split.AXIS,)))  # type: ignore[arg-type]


def _decoder(**sizes: int) -> DecoderConfig:
    given: dict[str, Any] = {"heads": 8, "kv_heads": 4, "mlp": 48, **sizes}
    return DecoderConfig(
        family="qwen3", vocab_size=21, hidden=32, layers=1, head_dim=8, rope_theta=1e4, norm_eps=1e-6, tied=True,
        max_position=32, **given,
    )  # fmt: skip


def _onerec(**sizes: int) -> LazyConfig:
    given: dict[str, Any] = {"heads": 8, "kv_heads": 4, "mlp": 48, **sizes}
    return LazyConfig(
        vocab_size=21,
        first_tokens=(3,),
        level_sizes=(6,),
        max_items=3,
        hidden=32,
        layers=1,
        head_dim=8,
        **given,
    )


@pytest.mark.parametrize("of", [_decoder, _onerec])
@pytest.mark.parametrize(
    ("count", "sizes", "message"),
    [
        (3, {}, "3 does not divide the model's heads, 8"),
        (4, {"mlp": 50}, "4 does not divide the model's mlp, 50"),
        (
            4,
            {"heads": 24, "kv_heads": 6},
            "4 neither divides the model's kv_heads, 6, nor is a multiple of them",
        ),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    of: Callable[..., Any], count: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.tensor_parallel: {message}"):
        of_generator(of(**sizes), _devices(count))


def test_more_devices_than_there_are_are_refused(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel: 64, but this process has .* device"):
        load_any(override(config, "model.tensor_parallel=64"))
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel must be at most 64, not 65"):
        override(Config(), "model.tensor_parallel=65")
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel"):
        override(Config(), "model.tensor_parallel=0")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (Spec((2, 32, 64), ("layer", "embed", "heads")), 2),
        (Spec((2, 48, 32), ("layer", "mlp", "embed")), 1),
        (Spec((2, 3, 32, 16), ("layer", "expert", "embed", "mlp")), 3),
        (Spec((2, 32), ("layer", "embed")), None),  # a norm's scale
        (Spec((24, 32), ("vocab", "embed")), 0),
        (Spec((21, 32), ("vocab", "embed")), 1),  # rows that do not divide are divided themselves
        (Spec((21, 30), ("vocab", "embed")), None),
        (Spec((21,), ("items",)), None),
    ],
)
def test_a_parameter_is_divided_along_one_axis(spec: Spec, expected: int | None) -> None:
    assert Placement(_devices(8)).divided(spec) == expected


def test_one_device_is_bound_to_no_mesh() -> None:
    assert Devices.of(1) == Devices()
    assert split.devices() == 1
    assert split.along(2) == PartitionSpec(None, None, split.AXIS)


def test_a_replica_that_sees_too_few_gpus_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    settings = ("model.tensor_parallel=2", "fleet.gpus=2")
    assert Source((str(tmp_path / "model"),), assignments=settings).configs()[0].model.tensor_parallel == 2
    with pytest.raises(ConfigError, match=r"fleet.gpus: a replica sees 1, and model.tensor_parallel needs 2"):
        Source((str(tmp_path / "model"),), assignments=("model.tensor_parallel=2", "fleet.gpus=1")).configs()
