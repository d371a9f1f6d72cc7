# SPDX-License-Identifier: Apache-2.0
"""A server whose prompts the kernels for CPUs compute, beside one where model.native switches them off."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jgr.config import override
from jgr.ops import native
from jgr.serving.decoders.loading import load_engine
from tests.native import installed
from tests.serving.decoders.test_model_server import Served, body, history
from tests.serving.tiny_model import make_folder

pytestmark = pytest.mark.native

CACHED = (
    "rank.method=likelihood",
    "cache.policy=user",
    "cache.shadow=0",
    "cache.item_share=none",
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """With the kernels, and without."""
    config = override(
        make_folder(tmp_path_factory.mktemp("model") / "tiny", depth=2),
        "profiles.tokens=64",
        "profiles.batch=1",
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


@pytest.mark.amx
@pytest.mark.parametrize("cached", [False, True])
def test_bfloat16_is_served_where_the_library_has_kernels_for_it(
    tmp_path: Path, cached: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are float32's, but for what 16 bits leave; a prompt that is kept is read again from what was kept."""
    caplog.set_level(logging.INFO, logger="jgr")
    shapes = ("profiles.batch=1", "profiles.tokens=32", *(CACHED if cached else ()))
    config = override(make_folder(tmp_path / "tiny", head_dim=32, depth=2), *shapes)
    with installed():
        served = [Served(override(config, f"model.dtype={dtype}")) for dtype in ("bfloat16", "float32")]
        try:
            assert "in bfloat16, " in caplog.text
            texts = list(served[0].engine.served.executors.program_texts())
            assert all("jgr_native_inputs_bfloat16" in text for text in texts) and texts
            for path, fields in (
                ("/v1/rank", {"candidates": [f"B{c:03}" for c in range(0, 60, 4)]}),
                ("/v1/recommend", {"top_k": 16, "beam_width": 16, "user_id": "u"}),
                ("/v1/recommend", {"top_k": 16, "beam_width": 16, "user_id": "u"}),
            ):
                answers = [each.post(path, body(history(0, 9), **fields)) for each in served]
                found, want = ({item["item_id"]: item["score"] for item in a["items"]} for a in answers)
                common = sorted(found.keys() & want.keys())
                assert len(common) >= len(want) - 2  # the last of a beam may change places
                np.testing.assert_allclose(
                    [found[item] for item in common], [want[item] for item in common], rtol=0, atol=0.15
                )
            assert [a["usage"]["cached_tokens"] > 0 for a in answers] == [cached, cached]
        finally:
            assert [each.stop() for each in served] == [0, 0]
