# SPDX-License-Identifier: Apache-2.0
"""Keys and values that are kept in 8 bits: what reads them scores as numpy's rounding does, what does not is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.pages import Room
from jgr.config import CacheConfig, ConfigError, override
from jgr.models.words import WORD
from jgr.serving.decoders.caching import identity, kv_cells, kv_room
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import PlannedPrompt
from tests.serving.decoders import test_paged_executor as paged
from tests.serving.decoders.test_cached_server import Served, ids, make_config
from tests.serving.decoders.test_paged_executor import CFG, ITEMS, Request, wanted

NEAR = 0.5
"""How far a score is from the exact one at most here, where a request's scores are some 10 apart."""
PROFILE = paged.PROFILES[0]


def by_numpy(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Vectors along the last axis, rounded to 8-bit integers and read again."""
    factor = (np.abs(x).max(-1, keepdims=True) * np.float32((1 + 2**-8) / 127)).astype(ml_dtypes.bfloat16)
    step = np.where(factor > 0, factor, 1).astype(np.float32)
    return np.round(x / step).astype(np.float32) * factor.astype(np.float32)


class Server(paged.Server):
    """Checks answers that read nothing kept exactly, and the others within NEAR. off: how far these were."""

    def __init__(self) -> None:
        size = 3, 8 * paged.TOKEN_BYTES, 2
        if (*size, "int8") not in paged.EXECUTORS:
            paged.EXECUTORS[*size, "int8"] = paged.make_executor(*size, "int8", (PROFILE,))
        super().__init__("cache_agnostic", pages=3, host_pages=2, quantize="int8")
        scheduler = PromptScheduler([PROFILE], self.meta, max_tokens=80, policy="cache_agnostic")
        self.schedulers["rank"] = scheduler
        self.off: list[float] = []

    def check(self, request: Request, plan: PlannedPrompt, outcome: Any) -> None:
        if not plan.cached_tokens:
            paged.check(request, plan.layout, outcome)
            return
        exact = wanted(request, plan.layout)
        np.testing.assert_allclose(outcome.scores, exact, atol=NEAR)
        self.off.append(float(np.abs(outcome.scores - exact).max()))


def test_random_traffic_with_moves_to_the_host_is_near_the_answers_without_a_cache() -> None:
    rng, small = np.random.default_rng(7), Server()
    histories = {name: rng.integers(12, 40, rng.integers(3, 16)).tolist() for name in "abcdefgh"}
    for _ in range(12):
        requests = []
        for _ in range(rng.integers(1, 5)):
            name = str(rng.choice([*histories]))
            if rng.random() < 0.3:
                histories[name] = (histories[name] + rng.integers(12, 40, 2).tolist())[-20:]
            rows = rng.choice(len(ITEMS), rng.integers(1, 5), replace=False).tolist()
            requests.append(Request(name, histories[name], rows))
        small.serve(*requests)
    counts = small.meta.counts
    assert counts["to_host"] and counts["to_device"] and counts["user_evicted"] + counts["item_evicted"]
    assert 1e-3 < np.median(small.off) < NEAR / 10, (
        "an answer that reads 8 bits can be told from an exact one"
    )


def test_what_reads_kept_tokens_scores_as_with_those_that_numpy_rounded() -> None:
    """The same plans by an executor whose pool holds float32, which numpy rounds between the two batches."""
    small = Server()
    whole = paged.make_executor(40, 8 * paged.TOKEN_BYTES, 0, profiles=(PROFILE,))
    request = Request("n", range(12, 32), [0, 1, 2])
    found = []
    for at in range(2):
        if at:
            pool = np.array(whole.pool._array)
            pool[:] = (
                by_numpy(pool.view(np.float32).reshape(-1, CFG.head_dim)).view(np.uint32).reshape(pool.shape)
            )
            whole.pool._array = jax.device_put(jnp.asarray(pool), whole.pool.sharding)
        group, works = small.plan(small.jobs(request), [request])
        assert group.profile == PROFILE and group.prompts[0].cached_tokens == 20 * at
        found = [executor.run(PROFILE, works)[0].scores for executor in (small.executor, whole)]
        small.schedulers["rank"].finished(group.jobs, True)
        np.testing.assert_allclose(found[0], found[1], atol=2e-5)
    assert np.abs(found[0] - wanted(request, "user_prefix")).max() > 1e-4


@pytest.mark.parametrize(("dtype", "itemsize", "times"), [("float32", 4, 3.87), ("bfloat16", 2, 1.93)])
def test_entries_take_a_fourth_of_float32_and_half_of_bfloat16(
    dtype: str, itemsize: int, times: float
) -> None:
    cfg = replace(CFG, head_dim=64)
    plain, small = (
        kv_room(kv_cells(CacheConfig(quantize=kind), cfg, dtype, itemsize, 1 << 16)) for kind in ("", "int8")
    )
    assert plain == Room(2 * cfg.layers * 2 * cfg.kv_heads * 64 * itemsize, 1, 2)
    assert plain.bytes / small.bytes == pytest.approx(times, abs=0.01)


def test_cells_of_another_kind_do_not_stand_for_these() -> None:
    cells = [kv_cells(CacheConfig(quantize=kind), CFG, "float32", 4, 1 << 16) for kind in ("", "int8", "fp8")]  # type: ignore[arg-type]
    assert len({identity("r", kv) for kv in cells}) == len({kv.held for kv in cells}) == 3
    with pytest.raises(ConfigError, match=r"cache\.quantize"):
        CacheConfig(quantize="int4")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = make_config(tmp_path_factory.mktemp("model"))
    config = override(
        config, "cache.quantize=fp8", "cache.policy=user", "profiles.batch=1", "profiles.tokens=64"
    )
    served = Served(config, kinds=("recommend",))
    yield served
    served.stop()


def test_over_http_a_kept_history_is_told_and_counted_as_ever_and_its_drift_shows(served: Served) -> None:
    asked = {"user_id": "u", "history": ids(*range(12)), "top_k": 4, "explain": True}

    def answer() -> tuple[dict[str, Any], npt.NDArray[np.float64]]:
        reply = served.call("/v1/recommend", asked)
        assert reply.status == 200, reply.body
        return reply.json, np.array([item["score"] for item in reply.json["items"]])

    (cold, exact), (warm, near) = answer(), answer()
    assert [a["usage"]["cached_tokens"] for a in (cold, warm)] == [0, 13]
    assert warm["explain"][0] == {"segment": "user", "tokens": 13, "cached_tokens": 13, "kept": False}
    far = np.abs(near - exact).max()
    assert 1e-4 < far < 1
    # The shadow runs while the server is idle.
    assert any(served.metrics("jgr_quantize_drift_count") == [1] for _ in range(1000))
    rounding, sum_, plain = served.metrics(
        'jgr_quantize_drift_bucket{le="0.0001"}', "jgr_quantize_drift_sum", "jgr_shadow_drift_count"
    )
    assert (rounding, plain) == (0, 0) and sum_ == pytest.approx(far, abs=1e-4)
    caching = served.engine.served.caching
    assert caching is not None and caching.kv.rounded is not None
    cells = -(-13 // caching.kv.tokens) * caching.kv.parts
    pages = -(-cells // (caching.memory.pool.page_bytes // (caching.kv.cells.words * WORD)))
    assert served.metrics('jgr_cache_pages{holder="user"}') == [pages]
    assert served.call("/v1/users/u/cache", method="DELETE").json == {"entries": 1}
    np.testing.assert_allclose(answer()[1], exact, atol=1e-4)
