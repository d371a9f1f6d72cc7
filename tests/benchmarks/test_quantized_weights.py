# SPDX-License-Identifier: Apache-2.0
"""What is compared with what: common items, and each ratio over float32's row of the same model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import quantized_weights as bench
from benchmarks.titles import title
from jgr.models import decoder, params


def test_overlap_is_the_share_of_common_items_in_any_order() -> None:
    one = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    other = np.array([[4, 3, 2, 1], [5, 9, 10, 11]], np.int32)
    assert bench.overlap(one, one) == 1
    assert bench.overlap(one, other) == pytest.approx((1 + 0.25) / 2)


def test_claims_are_ratios_over_float32_of_the_same_run() -> None:
    rows = [
        {"quality": kind, "overlap@10": o, "ndcg@10": n}
        for kind, o, n in (("float32", 1.0, 0.1), ("int8", 0.97, 0.0995), ("fp8", 0.8, 0.09))
    ]
    for model, factor in (("16m", 1.0), (bench.LARGE, 2.0)):
        for kind, weights, peak, ms in (
            ("float32", 100, 200, 10.0),
            ("int8", 40, 80, 9.0),
            ("fp8", 40, 90, 12.0),
        ):
            times = {"prompt_ms": {"median": factor * ms}, "step_ms": {"median": 2 * ms}}
            rows.append(
                {"model": model, "kind": kind, "weights_bytes": weights, "load_peak_bytes": peak, **times}
            )
    found = {claim.id: claim for claim in bench.claims(rows)}
    assert len(found) == 4 + 4 + 8
    assert found["overlap@10-of-fp8-with-float32"].value == 0.8
    assert not found["overlap@10-of-fp8-with-float32"].holds
    assert found["ndcg@10-of-int8-over-float32"].value == pytest.approx(0.995)
    assert found["weights-of-int8-over-float32-104m"].value == 0.4
    assert found["load-peak-of-fp8-over-float32-104m"].value == 0.45
    assert found["prompt-time-of-int8-over-float32-16m"].value == 0.9
    assert found["step-time-of-fp8-over-float32-104m"].value == 1.2
    assert not found["step-time-of-fp8-over-float32-104m"].holds
    titles = [title(claim.to_json()) for claim in found.values()]
    assert None not in titles and len(set(titles)) == len(titles)


def test_the_models_have_the_sizes_that_their_names_say() -> None:
    for name, cfg in bench.MODELS.items():
        assert params.count(decoder.spec(cfg)) / 1e6 == pytest.approx(int(name.removesuffix("m")), abs=1)
