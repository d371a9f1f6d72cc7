# SPDX-License-Identifier: Apache-2.0
"""The pool of cached segments, which may be lost or hold any bits, and the compiled programs, which never copy it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jgr.cache.pool import PoolLost
from jgr.models import packed, packed_recommend
from jgr.models.kv import ContextKV
from jgr.serving.decoders.paged_executor import _smallest_work
from jgr.serving.policies.jobs import Profile
from tests.serving.decoders.test_paged_executor import (
    CFG,
    PARAMS,
    PROFILES,
    TOKEN_BYTES,
    A,
    B,
    Request,
    Server,
)


def broken(*_: Any) -> Any:
    raise ArithmeticError("the device is gone")


def test_a_lost_pool_refuses_the_second_plan_in_flight_and_planned_again_it_is_right() -> None:
    server = Server("user")
    server.serve(A)
    jobs = server.jobs(A, A)
    first, works = server.plan(jobs[:1], [A, A])
    second, others = server.plan(jobs[1:], [A, A])
    assert others[0].plan.cached_tokens == 20, "it wants to read what is about to be lost"
    program = server.executor._programs[first.profile]
    try:
        server.executor._programs[first.profile] = broken  # type: ignore[assignment]
        with pytest.raises(ArithmeticError):
            server.executor.launch(first.profile, works)
    finally:
        server.executor._programs[first.profile] = program
    with pytest.raises(PoolLost):
        server.executor.launch(second.profile, others)
    for group in (first, second):
        server.schedulers["rank"].finished(group.jobs, False)
    assert server.serve(A)[0].cached_tokens == 0
    assert [plan.cached_tokens for plan in server.serve(A, B)] == [20, 0]


def test_a_batch_that_fails_on_the_device_loses_the_pool_once_for_all_that_were_behind_it() -> None:
    server = Server("user")
    server.serve(A)
    epoch = server.pool.epoch
    group, works = server.plan(server.jobs(A), [A])
    pending = replace(server.executor.launch(group.profile, works), outputs=Unreadable())
    behind = replace(pending)
    with pytest.raises(ArithmeticError):
        server.executor.collect(pending)
    with pytest.raises(PoolLost):  # its requests are planned again
        server.executor.collect(behind)
    server.schedulers["rank"].finished(group.jobs, False)
    assert server.pool.epoch == epoch + 1
    assert server.serve(A)[0].cached_tokens == 0


class Unreadable:
    """An array whose computation failed."""

    __array__ = broken


def test_a_batch_that_cannot_be_packed_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("user")
    server.serve(A)
    group, works = server.plan(server.jobs(A), [A])
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(server.executor, "_pack", broken)
        server.executor.launch(group.profile, works)
    server.schedulers["rank"].finished(group.jobs, False)
    assert server.serve(A)[0].cached_tokens == 20


def test_what_other_models_left_in_the_pool_does_no_harm() -> None:
    """Free pages hold any bits, of which many are no numbers."""
    server = Server("user")
    server.serve(Request("c", range(14, 31), [1]))
    free = server.meta.pages.free
    assert free > 0
    nan = np.full(server.pool.example.shape, np.float32(np.nan), np.float32).view(np.uint32)
    used = [cell // server.kv.cells.per_page for e in server.meta._all("user") for cell in e.cells]
    keep = np.unique(used)
    server.pool.write(lambda array: jax.numpy.asarray(nan).at[keep].set(array[keep]), server.pool.epoch)
    plans = server.serve(Request("c", range(14, 33), [1, 2]), A) + server.serve(A, B)
    assert [plan.cached_tokens for plan in plans] == [17, 0, 20, 0]
    server.serve(Request("c", range(14, 33), []), Request("a", range(12, 32), []))


def test_a_move_that_failed_fails_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("user", pages=6, host_pages=9)
    a, b = (Request(name, range(12, 32), [1]) for name in "ab")
    server.serve(a)
    with monkeypatch.context() as patch:
        patch.setattr(server.host, "_keep", broken)
        server.serve(b)  # in a's place
    with pytest.raises(ArithmeticError):
        server.serve(a)
    for jobs in list(server.schedulers["rank"]._pinned):
        server.schedulers["rank"].finished(jobs, False)
    plans = [server.serve(request)[0] for request in (a, b, a, b)]
    assert [plan.cached_tokens for plan in plans] == [0, 0, 20, 20]


def test_no_program_copies_the_pool() -> None:
    """What a program needs besides its arguments is the same however large the pool is; a write is in place."""
    server = Server("user")
    pool = jax.ShapeDtypeStruct((100_000, server.pool.page_bytes // 4), np.uint32)
    for profile in (PROFILES[0], PROFILES[2]):
        small: Any = server.executor._programs[profile].memory_analysis()
        large: Any = lowered(server, profile, pool).compile().memory_analysis()
        # A compiler may lay temporaries out anew, but not for a page of the pool more.
        assert abs(large.temp_size_in_bytes - small.temp_size_in_bytes) < server.pool.page_bytes
    new = jax.ShapeDtypeStruct((CFG.layers, 1, CFG.kv_heads, 24, CFG.head_dim), np.float32)
    slots = jax.ShapeDtypeStruct((24, 1), np.int32)
    write = packed.write.lower(pool, ContextKV(new, new), slots, kv=server.kv).compile()
    analysis: Any = write.memory_analysis()
    assert analysis.alias_size_in_bytes == 100_000 * server.pool.page_bytes
    assert analysis.temp_size_in_bytes < 10 * 24 * TOKEN_BYTES


def lowered(server: Server, profile: Profile, pool: Any) -> Any:
    arrays = server.executor._blank(profile)
    server.executor._pack(arrays, profile, [_smallest_work(profile)])
    if profile.kind == "rank":
        return packed.rank.lower(PARAMS, pool, arrays.row, arrays.asked, cfg=CFG, kv=server.kv)
    tables, filters = server.executor._over_catalog(profile, [])
    inputs = PARAMS, pool, tables, arrays.row, arrays.prompts, arrays.widths, filters
    return packed_recommend.recommend.lower(*inputs, cfg=CFG, kv=server.kv, width=profile.width)


def test_a_program_reads_one_layer_of_the_cached_tokens_at_a_time() -> None:
    """Every gather from the pool takes a token's keys and values of a single layer."""
    server = Server("user")
    text = lowered(server, PROFILES[0], server.pool.example).as_text()
    from_pool = [
        line for line in text.splitlines() if "stablehlo.gather" in line and f"x{server.kv.run}xui32>" in line
    ]
    wanted = f"-> tensor<{PROFILES[0].context}x{server.kv.run}xui32>"
    assert len(from_pool) == 2, (
        "within the loop over layers, and in the last layer, which computes fewer places"
    )
    assert all(wanted in line for line in from_pool)
