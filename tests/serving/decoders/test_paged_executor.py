# SPDX-License-Identifier: Apache-2.0
"""Scores with cached segments against the same prompts computed whole, one by one, by the plain formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from jgr.cache.entries import Name
from jgr.cache.host import HostTier
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages
from jgr.cache.pool import DevicePool
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig
from jgr.models import beam, decoder, params
from jgr.models.quantize import Quantization
from jgr.prompt.layouts import CAUSAL, ITEM_PREFIX, LAYOUTS, USER_PREFIX, Layout, LayoutName, Tokens
from jgr.prompt.segments import Content, Prompt, arrange, count_tokens, make_prompt
from jgr.serving.decoders.caching import kv_cells, kv_room
from jgr.serving.decoders.packing import UnservedSource
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.work import RankOutcome, RecommendOutcome, SegmentsWork
from jgr.serving.engine.compilation import CompilationCounter
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import Approximate, PlannedPrompt, UnplannedPrompt

CFG = decoder.DecoderConfig("qwen3", 40, 16, 2, 4, 2, 8, 32, 1e4, 1e-6, True, 256)
PARAMS = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(CFG), jax.random.key(0)))
SPAN, LONGEST = 4, 64
TREE = PrefixTree.build(np.random.default_rng(0).integers(0, 4, (20, 2)).astype(np.int32))
TABLES = beam.catalog_tables(
    TREE, (np.arange(4, 8, dtype=np.int32), np.arange(8, 12, dtype=np.int32)), PARAMS
)
PROFILES = (
    Profile("rank", 4, 48, 24, packed=True, context=64),
    Profile("rank", 4, 96, 24, packed=True, context=64),
    Profile("recommend", 4, 96, 6, packed=True, context=64),
)
Int32 = npt.NDArray[np.int32]


def tokens(*values: int) -> Int32:
    return np.array(values, np.int32)


ITEMS = [tokens(*np.random.default_rng(row).integers(12, 40, 1 + row % SPAN)) for row in range(9)]
INSTRUCTION, PROBE = tokens(1, 2), tokens(3)


class Request:
    def __init__(
        self,
        user: str,
        history: Sequence[int],
        items: Sequence[int],
        probe: bool = False,
        layout: LayoutName | None = None,
    ) -> None:
        self.user, self.rows = user, items
        known, listed = Content.of(tokens(*history)), [(row, Content.of(ITEMS[row])) for row in items]
        self.prompt = make_prompt(
            known, INSTRUCTION, listed, PROBE if probe else None, key=user, room=SPAN if items else 0
        )
        columns = tokens(*(30 + row for row in items))
        self.work = SegmentsWork(self.prompt, columns, columns * 0 + 12 if probe else None, 0 if items else 5)
        self.unplanned = UnplannedPrompt(self.prompt, layout if items else "user_prefix")

    @property
    def width(self) -> int:
        return self.work.beam_width or len(self.rows)


def whole(prompt: Prompt, layout: Layout) -> tuple[Any, list[int], npt.NDArray[np.float32]]:
    """The whole prompt's description, where each segment ends, and its hidden states; padded to one length."""
    segments = arrange(prompt, layout)
    lengths = [len(segment.tokens) for segment in segments]
    flat = np.concatenate([segment.tokens for segment in segments])
    fields = [
        np.repeat([getattr(segment, name) for segment in segments], lengths) for name in ("number", "kind")
    ]
    position = np.concatenate([segment.offset + np.arange(len(segment.tokens)) for segment in segments])
    pad = LONGEST - len(flat)
    described = Tokens(
        *(
            np.pad(x, (0, pad), constant_values=fill)[None].astype(np.int32)
            for x, fill in (
                (np.zeros(len(flat)), -1),
                (fields[0], 0),
                (fields[1], 0),
                (np.arange(len(flat)), 0),
                (position, 0),
            )
        )
    )
    out = _prefill(np.pad(flat, (0, pad))[None], described, layout.name)
    return out, np.cumsum(lengths).tolist(), np.asarray(out.hidden[0])


@jax.jit
def _by_user(x: Any, described: Tokens) -> Any:
    return decoder.prefill(PARAMS, CFG, x, x, segments=described, layout=USER_PREFIX, attention="reference")


@jax.jit
def _by_item(x: Any, described: Tokens) -> Any:
    return decoder.prefill(PARAMS, CFG, x, x, segments=described, layout=ITEM_PREFIX, attention="reference")


@jax.jit
def _causal(x: Any, described: Tokens) -> Any:
    return decoder.prefill(PARAMS, CFG, x, x, segments=described, layout=CAUSAL, attention="reference")


def _prefill(x: Int32, described: Tokens, layout: str) -> Any:
    forms = {"user_prefix": _by_user, "item_prefix": _by_item, "causal": _causal}
    return forms[layout](x, described)


def wanted(request: Request, layout: str) -> npt.NDArray[np.float32]:
    prompt = request.prompt
    _, ends, hidden = whole(prompt, LAYOUTS[layout])
    head = np.asarray(PARAMS.output_rows)
    if request.work.negative_columns is None:
        return np.asarray(hidden[ends[len(request.rows) + 1] - 1] @ head[request.work.columns].T)
    at = hidden[np.array(ends[-len(request.rows) :]) - 1]
    direction = head[request.work.columns] - head[request.work.negative_columns]
    return np.asarray((at * direction).sum(-1))


def wanted_beams(request: Request) -> tuple[Any, Any]:
    text = np.concatenate([segment.tokens for segment in request.prompt])
    found = beam.recommend(
        PARAMS,
        TABLES,
        np.pad(text, (0, LONGEST - len(text)))[None],
        tokens(len(text)),
        tokens(request.width),
        cfg=CFG,
        width=6,
    )
    return np.asarray(found.leaves)[0, : request.width], np.asarray(found.scores)[0, : request.width]


TOKEN_BYTES = CFG.layers * 2 * CFG.kv_heads * CFG.head_dim * 4
EXECUTORS: dict[tuple[int, int, int, Quantization], PagedExecutor] = {}


def make_executor(
    pages: int,
    page_bytes: int,
    host_pages: int,
    quantize: Quantization = "",
    profiles: tuple[Profile, ...] = PROFILES,
    pool: DevicePool | None = None,
) -> PagedExecutor:
    """Cells of four tokens, or of a part of their layers where a page does not hold all."""
    pool = pool or DevicePool(pages, page_bytes)
    kv = kv_cells(CacheConfig(cell_tokens=4, quantize=quantize), CFG, "float32", 4, page_bytes)
    host = HostTier(pool, host_pages) if host_pages else None
    made = PagedExecutor(CFG, PARAMS, TABLES, profiles, pool, kv, LONGEST, "valid", host=host)
    made.warm_up(lambda done, total, label: None)
    return made


class Server:
    """Policies and executor as the engine drives them."""

    def __init__(
        self,
        policy: Policy,
        pages: int = 12,
        host_pages: int = 0,
        page_bytes: int = 8 * TOKEN_BYTES,
        quantize: Quantization = "",
    ) -> None:
        size = max(pages, 12), page_bytes, host_pages, quantize  # of pools of a size, programs are the same
        if size not in EXECUTORS:
            EXECUTORS[size] = make_executor(*size)
        self.executor = EXECUTORS[size]
        self.pool, self.kv, self.host = self.executor.pool, self.executor.kv, self.executor._host
        host = None if self.host is None else Pages(host_pages, page_bytes)
        hotness = ExponentialWindow(100, 50) if policy == "hotness" else None
        room = kv_room(self.kv)
        self.meta = CacheMeta(Pages(pages, page_bytes), {"user": room, "item": room}, hotness, host)
        self.meta.set_limit("item", pages // 2)
        self.meta.set_limit("user", pages - pages // 2)
        self.schedulers = {
            kind: PromptScheduler(
                [p for p in PROFILES if p.kind == kind], self.meta, max_tokens=80, policy=policy
            )
            for kind in ("rank", "recommend")
        }
        self.now = 0

    def plan(self, jobs: Sequence[Job], requests: Sequence[Request]) -> tuple[Any, list[Any]]:
        """The next batch and its works."""
        self.meta.renew(self.pool.epoch)
        group = self.schedulers[jobs[0].kind].group(jobs, True, self.now)
        assert group is not None and group.jobs
        if self.host is not None:
            self.host.plan(group.moves, self.kv.cells, self.meta.epoch)
        pairs = zip(group.jobs, group.prompts, strict=True)
        return group, [replace(requests[job].work, plan=p, epoch=self.meta.epoch) for job, p in pairs]

    def jobs(self, *requests: Request) -> list[Job]:
        kind = "rank" if requests[0].rows else "recommend"
        self.now += len(requests)
        return [
            Job(at, kind, count_tokens(request.prompt), request.width, self.now, None, request.unplanned)  # type: ignore[arg-type]
            for at, request in enumerate(requests)
        ]

    def serve(self, *requests: Request) -> list[Any]:
        """Every answer with its plan, checked, in order; all are queued at once."""
        jobs = self.jobs(*requests)
        scheduler = self.schedulers[jobs[0].kind]
        plans: list[Any] = []
        while jobs:
            group, works = self.plan(jobs, requests)
            jobs = jobs[len(group.jobs) :]
            outcomes = self.executor.run(group.profile, works)
            scheduler.check()
            scheduler.finished(group.jobs, True)
            for job, plan, outcome in zip(group.jobs, group.prompts, outcomes, strict=True):
                self.check(requests[job], plan, outcome)
            plans += group.prompts
        self.meta.check()
        assert self.meta.pinned == 0
        return plans

    def check(self, request: Request, plan: PlannedPrompt, outcome: Any) -> None:
        check(request, plan.layout, outcome)


def check(request: Request, layout: str, outcome: Any) -> None:
    if isinstance(outcome, RankOutcome):
        np.testing.assert_allclose(outcome.scores, wanted(request, layout), atol=2e-5)
        return
    assert isinstance(outcome, RecommendOutcome)
    leaves, scores = wanted_beams(request)
    np.testing.assert_array_equal(outcome.leaves, leaves)
    np.testing.assert_allclose(outcome.scores, scores, atol=2e-5)


A, B = Request("a", range(12, 32), [0, 1, 2, 5]), Request("b", range(20, 29), [5, 2, 7, 8, 3])


@pytest.mark.parametrize("policy", ["none", "user", "item", "cache_agnostic", "hotness"])
def test_cold_warm_and_partly_cached_score_the_same(policy: Policy) -> None:
    server = Server(policy)
    server.serve(A)
    cold = server.serve(B, A)
    warm = server.serve(A, B)
    reused = [plan.cached_tokens for plan in warm]
    if policy == "none":
        assert reused == [0, 0]
    elif policy == "user":
        assert reused == [20, 9] and [plan.layout for plan in warm] == ["user_prefix"] * 2
    elif policy == "item":
        assert reused == [sum(len(ITEMS[row]) for row in r.rows) for r in (A, B)]
        assert cold[0].cached_tokens == len(ITEMS[5]) + len(ITEMS[2]), "two of b's items were a's"
    else:
        assert [plan.layout for plan in warm] == ["user_prefix", "item_prefix"], (
            "a is longer than its items, b not"
        )


@pytest.mark.parametrize("layout", [USER_PREFIX, ITEM_PREFIX])
@pytest.mark.parametrize("probe", [False, True])
def test_the_order_of_candidates_changes_nothing(layout: Layout, probe: bool) -> None:
    server = Server("user" if layout == USER_PREFIX else "item")
    one, other = (Request("c", range(15, 27), rows, probe) for rows in ([0, 1, 2, 3], [3, 1, 0, 2]))
    first, second = wanted(one, layout.name), wanted(other, layout.name)
    np.testing.assert_allclose(second, first[[3, 1, 0, 2]], atol=2e-5)
    server.serve(one)
    server.serve(other, one)


@pytest.mark.parametrize("probe", [False, True])
def test_causal_order_cold_warm_and_beside_other_layouts(probe: bool) -> None:
    server = Server("user")
    one = Request("c", range(15, 27), [0, 1, 2, 3], probe, "causal")
    other = Request("c", range(15, 30), [3, 6, 1], probe, "causal")
    first = Request("d", range(15, 20), [1, 3], probe)
    server.serve(one)
    plans = server.serve(other, first, one)
    assert [(plan.layout, plan.cached_tokens) for plan in plans] == [
        ("causal", 12),
        ("user_prefix", 0),
        ("causal", 12),
    ]


def test_causal_order_is_the_plain_decoder() -> None:
    """By a forward that knows of no segments."""
    request = Request("c", range(15, 27), [3, 0, 2], layout="causal")
    text = np.concatenate([segment.tokens for segment in request.prompt])
    out = jax.jit(lambda x, n: decoder.prefill(PARAMS, CFG, x, n))(text[None], tokens(len(text)))
    plain = np.asarray(out.hidden)[0, -1] @ np.asarray(PARAMS.output_rows)[request.work.columns].T
    np.testing.assert_allclose(wanted(request, "causal"), plain, atol=2e-5)
    server = Server("user")
    for _ in range(2):
        server.serve(request)


def test_moved_keys_are_refused() -> None:
    server = Server("none")
    plan = server.serve(A)[0]
    moved = structs.replace(plan.user, spans=(Approximate(20, tuple(range(60)), shift=3),))
    work = replace(A.work, plan=PlannedPrompt.of("user_prefix", (moved, *plan.segments[1:])))
    with pytest.raises(UnservedSource, match="moves cached tokens by up to 3 positions"):
        server.executor.run(PROFILES[0], [work])


def test_a_grown_history_computes_its_new_tokens_only() -> None:
    server = Server("user")
    server.serve(Request("a", range(12, 25), [1]))
    (plan,) = server.serve(Request("a", range(12, 36), [1]))
    assert plan.user.cached == 13
    (plan,) = server.serve(Request("a", range(12, 36), [1, 2]))
    assert plan.user.cached == 24
    (plan,) = server.serve(Request("a", [39, *range(13, 36)], [1, 2]))
    assert plan.user.cached == 0, "another history"


def test_recommend_shares_the_entries_of_rank() -> None:
    server = Server("user")
    server.serve(Request("a", range(12, 25), [1, 2]))
    both = server.serve(Request("a", range(12, 25), []), Request("b", [14], []))
    assert [plan.cached_tokens for plan in both] == [13, 0]
    server.serve(Request("b", [14, 15, 16], []), Request("a", range(12, 30), []))


def test_what_the_pool_gives_up_comes_back_from_the_host() -> None:
    server = Server("user", pages=6, host_pages=9)
    requests = [
        Request(name, range(start, start + 20), [1]) for name, start in (("a", 12), ("b", 14), ("c", 16))
    ]
    wanted(requests[0], "user_prefix")  # compiles
    counter = CompilationCounter()
    for _ in range(3):
        plans = [server.serve(request)[0] for request in requests]
    assert [plan.cached_tokens for plan in plans] == [20, 20, 20]
    assert server.meta.counts["to_device"] >= 3
    assert counter.counts == {"load": 0, "request": 0}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["user", "item", "cache_agnostic", "hotness"])
def test_random_traffic(policy: Policy) -> None:
    """Growing and changing histories, more than the pool holds, with a host tier; every answer is checked."""
    rng = np.random.default_rng(7)
    server = Server(policy, pages=6, host_pages=4)
    histories = {name: rng.integers(12, 40, rng.integers(3, 16)).tolist() for name in "abcdef"}
    for _ in range(40):
        requests = []
        for _ in range(rng.integers(1, 5)):
            name = str(rng.choice(list("aaabbcdef")))
            if rng.random() < 0.3:
                grown = histories[name] + rng.integers(12, 40, rng.integers(1, 4)).tolist()
                histories[name] = grown if len(grown) <= 24 and rng.random() < 0.8 else grown[-5:]
            items = rng.choice(9, rng.integers(1, 6), replace=False).tolist()
            requests.append(Request(name, histories[name], items))
        server.serve(*requests)
        if rng.random() < 0.1:
            server.meta.drop(Name("user", "a", "user_prefix"))
    assert server.meta.counts["user_evicted"] + server.meta.counts["item_evicted"] > 0


def test_layers_that_a_page_does_not_hold_together_stand_in_cells_of_their_own() -> None:
    server = Server("user", pages=40, page_bytes=2 * TOKEN_BYTES)
    assert (server.kv.parts, server.kv.layers) == (2, 1)
    server.serve(A, B)
    assert [plan.cached_tokens for plan in server.serve(B, A)] == [9, 20]
    server.serve(Request("a", range(12, 36), []))
