# SPDX-License-Identifier: Apache-2.0
"""Devices that each have the whole model and a part of every batch: answers are one device's, and cached items are read
from device to device in both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.config import Config, ConfigError, override
from jgr.serving.versions.loading import load_any
from tests.serving.tiny_model import make_folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What over_replicas.py printed."""
    # NPROC: what the server sets by itself is too late where the backend runs already.
    environment = {**os.environ, "PYTHONPATH": ".", "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    # A busy machine may keep a device waiting for the others for longer than the 40 s after which XLA gives up.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {patient}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.serving.decoders.over_replicas",
            str(tmp_path_factory.mktemp("models")),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def close(found: list[list[Any]], expected: list[list[Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert [item for item, _ in one] == [item for item, _ in other]
        np.testing.assert_allclose([x for _, x in one], [x for _, x in other], atol=1e-4, rtol=0)


@pytest.mark.parametrize("reads", ["copies", "all_to_all"])
def test_rankings_of_several_devices_are_those_of_one(ran: dict[str, Any], reads: str) -> None:
    """From cold and warm caches, by many clients at a time, after an erasure, and after a reload of other weights."""
    expected = ran["one"]["scores"]
    close(ran[reads]["scores"], expected)
    assert len({score for answer in expected for _, score in answer}) > len(expected)
    before, after = expected[: len(expected) // 2], expected[len(expected) // 2 :]
    assert before != after


@pytest.mark.parametrize("reads", ["copies", "all_to_all"])
def test_devices_read_each_others_items(ran: dict[str, Any], reads: str) -> None:
    told = ran[reads]
    assert told["cached"] > 0 and told["copied"] > 0
    assert 0 < told["read"] <= told["sent"]
    assert told["compiled"] == 0
    assert (ran["one"]["read"], ran["one"]["copied"]) == (0, 0)


@pytest.mark.parametrize("reads", ["one", "copies", "all_to_all"])
def test_an_erasure_reaches_every_device(ran: dict[str, Any], reads: str) -> None:
    assert ran[reads]["erased"] > 0 == ran[reads]["again"]


def test_an_exchange_sends_more_than_copies_do(ran: dict[str, Any]) -> None:
    """It moves as much between all pairs as the fullest pair needs."""
    each = {reads: ran[reads]["sent"] / ran[reads]["read"] for reads in ("copies", "all_to_all")}
    assert each["copies"] < each["all_to_all"]


def test_the_rows_of_a_batch_that_is_not_packed_are_parted(ran: dict[str, Any]) -> None:
    assert ran["parted"]


def test_what_does_not_divide_or_go_with_it_is_refused(ran: dict[str, Any]) -> None:
    assert ran["refused"] == [
        "profiles.batch: 4 rows do not divide over 8 devices (data_parallel.devices)",
        "cache.host_mb: is for one device, not for data_parallel.devices",
        "server.journal: is for one device, not for data_parallel.devices",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("data_parallel.devices=8",),
            r"data_parallel\.devices: 8, but this process has 1 device \(cpu\)",
        ),
        (
            ("data_parallel.devices=2", "model.tensor_parallel=2"),
            r"data_parallel\.devices: devices have a whole model each",
        ),
    ],
)
def test_what_devices_cannot_part_is_refused(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    config = make_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        load_any(override(config, *settings))


def test_too_many_devices_are_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"data_parallel\.devices must be at most 64, not 65"):
        override(Config(), "data_parallel.devices=65")
    with pytest.raises(ConfigError, match=r"data_parallel\.hot_share must be at most 1"):
        override(Config(), "data_parallel.hot_share=1.5")
