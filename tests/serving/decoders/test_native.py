# SPDX-License-Identifier: Apache-2.0
"""A server whose prompts the kernels for CPUs compute, beside one where model.native switches them off."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from jgr.config import override
from jgr.ops import native
from jgr.serving.decoders.loading import load_engine
from tests.native import installed
from tests.serving.decoders.test_model_server import Served, body, history
from tests.serving.tiny_model import make_folder

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """With the kernels, and without."""
    config = override(
        make_folder(tmp_path_factory.mktemp("model") / "tiny"), "profiles.tokens=64", "profiles.batch=1"
    )
    with installed():
        with_kernels = Served(config)
        without = Served(override(config, "model.native=false"))
        yield with_kernels, without
        assert with_kernels.stop() == without.stop() == 0


def test_the_model_says_what_computes(both: tuple[Served, Served]) -> None:
    found = [served.client.models()[0].kernels for served in both]
    assert found == [f"native-{native.library().kernels}", "xla"]


def test_programs_call_the_kernels_or_do_not(both: tuple[Served, Served]) -> None:
    calls = [
        ["jgr_native_output" in text for text in served.engine.served.executors.program_texts()]
        for served in both
    ]
    assert all(calls[0]) and not any(calls[1]) and len(calls[0]) == len(calls[1]) > 0


def test_answers_are_the_same(both: tuple[Served, Served]) -> None:
    rows = history(0, 9)
    for path, fields in (
        ("/v1/rank", {"candidates": [f"B{c:03}" for c in range(0, 60, 4)]}),
        ("/v1/recommend", {"top_k": 16, "beam_width": 16}),
    ):
        found, want = (served.post(path, body(rows, **fields))["items"] for served in both)
        assert [item["item_id"] for item in found] == [item["item_id"] for item in want]
        np.testing.assert_allclose(
            [item["score"] for item in found], [item["score"] for item in want], atol=2e-5
        )


def test_the_start_line_says_what_computes(
    both: tuple[Served, Served], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="jgr")
    native.use(True)
    load_engine(both[0].config)
    assert f"cpu by native-{native.library().kernels};" in caplog.text
