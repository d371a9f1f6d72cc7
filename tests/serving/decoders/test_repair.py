# SPDX-License-Identifier: Apache-2.0
"""Repaired item tokens (BAT-15) against the same prompts by a dense decoder in numpy, token by token as docs/cache.md
says: whichever part is cached, alone or in a batch, and the more are repaired, the nearer to the causal order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from jgr.cache.pool import DevicePool
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig, UserError
from jgr.models import beam, decoder, packed, params
from jgr.prompt.layouts import ITEM_PREFIX, Kind
from jgr.prompt.segments import Content, arrange, count_tokens, make_prompt
from jgr.serving.decoders.caching import kv_cells
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import PagedExecutor, _smallest_work
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.sources import (
    ALL_ITEM_TOKENS,
    NO_REPAIR,
    PlannedPrompt,
    Repair,
    UnplannedPrompt,
)
from tests.serving.decoders.dense import Dense
from tests.serving.decoders.driven import Driven
from tests.serving.decoders.test_cached_server import Served, ids, make_config, scores

CFG = decoder.DecoderConfig("qwen3", 40, 16, 3, 4, 2, 8, 32, 1e4, 1e-6, True, 256)
PARAMS = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(CFG), jax.random.key(1)))
SPAN = 4
TABLES = beam.catalog_tables(
    PrefixTree.build(np.arange(8, dtype=np.int32)[:, None]), (np.arange(4, 12, dtype=np.int32),), PARAMS
)
PROFILE = Profile("rank", 3, 96, 24, packed=True, context=32)
PAGES = 16
ITEMS = [np.random.default_rng(row).integers(12, 40, 1 + row % SPAN).astype(np.int32) for row in range(9)]
INSTRUCTION, PROBE = np.array([1, 2], np.int32), np.array([3], np.int32)
FIRST, SHARE = Repair(first=2), Repair(share=0.3)

Float64 = npt.NDArray[np.float64]


DENSE = Dense(CFG, PARAMS)


class Request:
    def __init__(self, user: str, history: Sequence[int], rows: Sequence[int], probe: bool = False) -> None:
        self.user, self.rows = user, list(rows)
        known, items = (
            Content.of(np.array(history, np.int32)),
            [(row, Content.of(ITEMS[row])) for row in rows],
        )
        self.prompt = make_prompt(known, INSTRUCTION, items, PROBE if probe else None, key=user, room=SPAN)
        columns = np.array([30 + row for row in rows], np.int32)
        self.work = SegmentsWork(self.prompt, columns, columns * 0 + 12 if probe else None)

    def unplanned(self, repair: Repair, fresh: bool = False) -> UnplannedPrompt:
        return UnplannedPrompt(self.prompt, "item_prefix", fresh, repair)

    def dense(self, repair: Repair) -> Float64:
        """The scores as docs/cache.md says: every item token's KV is that of the item alone, but for the repaired."""
        prompt = arrange(self.prompt, ITEM_PREFIX)
        lengths = [len(segment.tokens) for segment in prompt]
        of = np.repeat(np.arange(len(prompt)), lengths)
        within = np.concatenate([np.arange(n) for n in lengths])
        kind = np.array([segment.kind for segment in prompt])[of]
        position = np.array([segment.offset for segment in prompt])[of] + within
        tokens = np.concatenate([segment.tokens for segment in prompt])
        number = np.array([segment.number for segment in prompt])[of]

        place = np.arange(len(tokens))
        earlier = place[None, :] <= place[:, None]
        item, probe = kind == Kind.ITEM, kind == Kind.PROBE
        same = number[:, None] == number[None, :]
        alone = earlier & same & item[:, None] & item[None, :]
        causal = earlier & np.where((probe[:, None] & item[None, :]) | probe[None, :], same, True)

        kv = DENSE.run(tokens, position, alone & item[:, None] | np.eye(len(tokens), dtype=bool))
        repaired = item & (within < repair.first) & (of > 0)
        if repair.share:
            n_items = int(item.sum())
            fresh = DENSE.run(tokens[:n_items], position[:n_items], causal[:n_items, :n_items])
            change = ((fresh[1][1] - kv[1][1][:n_items]) ** 2).sum((1, 2))
            most = np.argsort(-change, kind="stable")[: math.ceil(repair.share * n_items)]
            repaired[most] = True
        rows = np.flatnonzero(repaired | ~item)
        h = DENSE.embed(tokens[rows])
        for layer in range(CFG.layers):
            q, *own = DENSE.project(layer, h, position[rows])
            k, v = (x.copy() for x in kv[layer])
            k[rows], v[rows] = own
            h = DENSE.step(layer, h, q, k, v, causal[rows])
        ends = np.flatnonzero(probe) if probe.any() else np.flatnonzero(kind == Kind.INSTRUCTION)[-1:]
        found = DENSE.logits(h[np.searchsorted(rows, ends)])
        columns = self.work.columns
        of_probe = np.arange(len(columns)) if probe.any() else 0
        out: Float64 = found[of_probe, columns] - (0 if self.work.negative_columns is None else found[:, 12])
        return out


@cache
def executor(repair: Repair) -> PagedExecutor:
    page_bytes = 8 * CFG.layers * 2 * CFG.kv_heads * CFG.head_dim * 4
    kv = kv_cells(CacheConfig(cell_tokens=4), CFG, "float32", 4, page_bytes)
    pool = DevicePool(PAGES, page_bytes)
    made = PagedExecutor(CFG, PARAMS, TABLES, (PROFILE,), pool, kv, 64, "valid", repair=repair)
    made.warm_up(lambda done, total, label: None)
    return made


class Server(Driven):
    def __init__(self, repair: Repair, pages: int = PAGES) -> None:
        """pages: that items may take."""
        self.repair = repair
        super().__init__(executor(FIRST if repair.first else SHARE), PROFILE, "item", 90, pages, 0)

    def serve(
        self, *requests: Request, repair: Repair | None = None, fresh: bool = False
    ) -> list[tuple[PlannedPrompt, Float64]]:
        repair = self.repair if repair is None else repair
        return self.score([(request.unplanned(repair, fresh), request.work) for request in requests])


A = Request("a", range(12, 24), [3, 1, 2, 7])
B = Request("b", range(20, 26), [7, 6, 3, 5, 0])
PROBING = [Request("c", range(14, 21), [5, 2, 3], probe=True), Request("d", [33, 17], [8, 3, 6], probe=True)]


def right(served: Sequence[tuple[PlannedPrompt, Float64]], repair: Repair, *requests: Request) -> None:
    for (_, found), request in zip(served, requests, strict=True):
        np.testing.assert_allclose(found, request.dense(repair), atol=5e-5)


@pytest.mark.parametrize("repair", [FIRST, Repair(first=1), SHARE, Repair(share=0.7)], ids=str)
def test_cold_warm_and_in_a_batch_score_as_defined(repair: Repair) -> None:
    server = Server(repair)
    cold = server.serve(A)
    partly = server.serve(B, A)
    warm = server.serve(A)
    probing = server.serve(*PROBING) + server.serve(*PROBING[::-1])
    right(cold + partly + warm, repair, A, B, A, A)
    right(probing, repair, *PROBING, *PROBING[::-1])
    assert cold[0][0].cached_tokens == 0 < partly[0][0].cached_tokens < partly[1][0].cached_tokens
    assert abs(A.dense(repair) - A.dense(NO_REPAIR)).max() > 1e-2


@pytest.mark.parametrize("repair", [FIRST, SHARE], ids=str)
def test_random_traffic(repair: Repair) -> None:
    """More items than the pages hold, and more cached tokens than a batch does."""
    rng = np.random.default_rng(5)
    server = Server(repair, pages=3)
    for _ in range(10):
        requests = [
            Request(
                str(i), rng.integers(12, 40, rng.integers(1, 9)).tolist(), rng.permutation(9)[:most].tolist()
            )
            for i, most in enumerate(rng.integers(1, 6, 3))
        ]
        right(server.serve(*requests), repair, *requests)
    assert server.meta.counts["item_evicted"] and server.meta.pinned == 0


@pytest.mark.parametrize("repair", [Repair(first=SPAN), Repair(share=1.0)], ids=str)
def test_all_of_it_is_the_causal_order(repair: Repair) -> None:
    server = Server(repair)
    requests = [B, A, *PROBING]
    served = [server.serve(request)[0] for request in requests for _ in range(2)]
    right(served, ALL_ITEM_TOKENS, *[request for request in requests for _ in range(2)])
    again = [server.serve(request, repair=ALL_ITEM_TOKENS, fresh=True)[0] for request in requests]
    right(again, ALL_ITEM_TOKENS, *requests)
    assert again[0][0].computed_tokens == count_tokens(B.prompt), (
        "nothing is computed twice for the comparison"
    )


@pytest.mark.parametrize(("repair", "kept"), [(FIRST, [11, 11]), (SHARE, [13, 14])], ids=["first", "share"])
def test_entries_are_the_items_alone(repair: Repair, kept: list[int]) -> None:
    """What repaired requests have written serves unrepaired ones; items that are repaired wholly are not written."""
    server = Server(repair)
    server.serve(A, B)
    served = server.serve(A, B, repair=NO_REPAIR)
    right(served, NO_REPAIR, A, B)
    assert [plan.cached_tokens for plan, _ in served] == kept


@pytest.mark.parametrize(
    "repairs",
    [
        [Repair(first=k) for k in range(1, SPAN + 1)],
        [Repair(share=share) for share in (0.15, 0.3, 0.6, 1.0)],
    ],
    ids=["first", "share"],
)
def test_the_more_is_repaired_the_less_it_drifts(repairs: Sequence[Repair]) -> None:
    """On average over prompts: mean distance to the causal order, by the dense reference."""
    rng = np.random.default_rng(2)
    requests = [
        Request(str(i), rng.integers(12, 40, 6).tolist(), rng.choice(9, 5, replace=False).tolist())
        for i in range(8)
    ]
    causal = [request.dense(ALL_ITEM_TOKENS) for request in requests]
    none = np.mean(
        [abs(request.dense(NO_REPAIR) - x).mean() for request, x in zip(requests, causal, strict=True)]
    )
    drifts = [none]
    for repair in repairs:
        served = Server(repair).serve(*requests)
        drifts.append(np.mean([abs(found - x).mean() for (_, found), x in zip(served, causal, strict=True)]))
    assert all(more < less for less, more in itertools.pairwise(drifts)), drifts
    assert drifts[-1] < 1e-4 < 0.1 * drifts[0]


def test_what_it_costs() -> None:
    total, items = count_tokens(A.prompt), [len(ITEMS[row]) for row in A.rows]
    assert items == [4, 2, 3, 4]
    server = Server(FIRST)
    cold, warm = (server.serve(A)[0][0] for _ in range(2))
    # Two tokens each of the items behind the first. Of the second, that is all: it is neither read nor kept.
    assert [item.repaired for item in warm.items] == [0, 2, 2, 2]
    assert [item.cached for item in warm.items] == [4, 0, 1, 2]
    assert (cold.computed_tokens, cold.cached_tokens, cold.repaired_tokens) == (total + 2 + 2, 0, 6)
    assert (warm.computed_tokens, warm.cached_tokens, warm.repaired_tokens) == (total - 7, 7, 6)
    assert A.unplanned(FIRST).computed_at_most == cold.computed_tokens

    server = Server(SHARE)
    cold, warm = (server.serve(A)[0][0] for _ in range(2))
    assert (cold.computed_tokens, cold.cached_tokens, cold.repaired_tokens) == (total + 4, 0, 4)
    assert (warm.computed_tokens, warm.cached_tokens, warm.repaired_tokens) == (total - 13 + 4, 13, 4)
    assert A.unplanned(SHARE).computed_at_most == cold.computed_tokens

    by_user = structs.replace(A.unplanned(SHARE), layout="user_prefix")
    group = server.scheduler.group([Job(9, "rank", 40, 4, 0, None, by_user)], True, 0)
    assert group is not None and group.prompts[0].repaired_tokens is None
    server.scheduler.finished(group.jobs, True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(make_config(tmp_path_factory.mktemp("model"), "cache.repair_tokens=1"), ["rank"])
    yield server
    server.stop()


def test_an_answer_says_that_it_approximates(served: Served) -> None:
    history, candidates = ids(*range(4)), ids(20, 21, 22)
    cold = served.rank("u", history, candidates, layout="item_prefix")
    warm = served.rank("v", history, candidates, layout="item_prefix")
    first, *others = warm["explain"][:3]
    assert (first["cached_tokens"], "repaired_tokens" in first) == (2, False)
    assert [(part["cached_tokens"], part["repaired_tokens"]) for part in others] == [(1, 1)] * 2
    usage = warm["usage"]
    assert (usage["repaired_tokens"], usage["cached_tokens"]) == (2, 4)
    assert usage["computed_tokens"] == usage["prompt_tokens"] - 4
    assert cold["usage"]["computed_tokens"] == usage["prompt_tokens"] + 2
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4)
    assert "repaired_tokens" not in served.rank("u", history, candidates, layout="user_prefix")["usage"]

    _wait_for(served, "jgr_repair_drift_count")
    rounding, near, far = served.metrics(
        'jgr_shadow_drift_bucket{le="0.0001"}',
        'jgr_repair_drift_bucket{le="0.0001"}',
        "jgr_repair_drift_count",
    )
    assert rounding == served.metrics("jgr_shadow_drift_count")[0] >= 1
    assert near == 0 < far, "it is an approximation"


def _wait_for(served: Served, name: str) -> None:
    assert any(served.metrics(name)[0] for _ in range(1000))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("cache.repair_share=1.5",), "cache.repair_share"),
        (("cache.repair_last_tokens=1",), "repair_last_tokens: needs cache.repair_share"),
        (("cache.repair_share=0.5", "cache.repair_last_tokens=-1"), "cache.repair_last_tokens"),
        (("cache.repair_share=0.5", "train.layers=1"), "one layer"),
    ],
)
def test_bad_settings(tmp_path: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_engine(make_config(tmp_path, *settings))


def test_the_check_reads_one_layer_of_what_is_cached() -> None:
    """Every gather from the pool takes one layer of the cached tokens: the first, the checked one, one of the
    loop, or the last one, which computes fewer places."""
    made = executor(SHARE)
    arrays = made._blank(PROFILE)
    made._pack(arrays, PROFILE, [_smallest_work(PROFILE)])
    inputs = (PARAMS, made.pool.example, arrays.row, arrays.asked)
    text = packed.rank.lower(*inputs, cfg=CFG, kv=made.kv).as_text()
    wanted = f"-> tensor<{PROFILE.context}x{made.kv.run}xui32>"
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line and "xui32>" in line]
    assert len(gathers) == 4 and all(wanted in line for line in gathers)
