# SPDX-License-Identifier: Apache-2.0
"""Items read wherever they stand in a prompt in plain order (RCLLM-11, 12, 16; PIC-1, 3, 4, 8), against the same
prompts by a dense decoder in numpy: each item alone at its place, then the repaired tokens with all that stands before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from jgr.cache.pool import DevicePool
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig, Config, ConfigError, override
from jgr.models import beam, decoder, params
from jgr.models.packed import ChosenBy
from jgr.prompt.layouts import CAUSAL, Kind
from jgr.prompt.segments import Content, arrange, count_tokens, make_prompt
from jgr.serving.api import RankRequest
from jgr.serving.decoders.caching import kv_cells
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.null import null_engine
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.decoders.work import RankOutcome, SegmentsWork
from jgr.serving.errors import RequestError
from jgr.serving.policies.fidelity import FEWEST, agreement
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.sources import ALL_ITEM_TOKENS, Approximate, PlannedPrompt, Repair, UnplannedPrompt
from jgr.serving.versions.deployment import Deployment
from tests.serving.decoders.dense import Dense
from tests.serving.decoders.driven import Driven
from tests.serving.decoders.test_cached_server import Served, ids, make_config, scores

CFG = decoder.DecoderConfig("qwen3", 40, 16, 3, 4, 2, 8, 32, 1e4, 1e-6, True, 256)
PARAMS = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(CFG), jax.random.key(1)))
SPAN = 5
TABLES = beam.catalog_tables(
    PrefixTree.build(np.arange(8, dtype=np.int32)[:, None]), (np.arange(4, 12, dtype=np.int32),), PARAMS
)
PROFILE = Profile("rank", 3, 128, 24, packed=True, context=64)
PAGES = 24
ITEMS = [np.random.default_rng(row).integers(12, 40, 1 + row % SPAN).astype(np.int32) for row in range(9)]
INSTRUCTION, PROBE = np.array([1, 2], np.int32), np.array([3], np.int32)
LABELS = [Content.of(np.array(tokens, np.int32)) for tokens in ([4], [5, 6], [7], [8, 9])]
DENSE = Dense(CFG, PARAMS)
Float64 = npt.NDArray[np.float64]


class Method(NamedTuple):
    """A member of the family: which tokens are repaired."""

    repair: Repair
    by: ChosenBy = "deviation"


NAIVE = Method(Repair(of_all=True))
EPIC = Method(Repair(2, of_all=True))
BLEND = Method(Repair(share=0.3, of_all=True))
RCLLM = Method(Repair(1, 0.3, of_all=True), "attention")
ENDS = Method(Repair(1, 0.1, of_all=True, last=1), "attention")
BLENDED_ENDS = Method(Repair(0, 0.1, of_all=True, last=2))
METHODS = {
    "naive": NAIVE,
    "epic": EPIC,
    "cacheblend": BLEND,
    "rcllm": RCLLM,
    "rcllm, both ends": ENDS,
    "cacheblend, last two": BLENDED_ENDS,
}


class Request:
    def __init__(
        self,
        user: str,
        history: Sequence[int],
        rows: Sequence[int],
        probe: bool = False,
        instruction: npt.NDArray[np.int32] = INSTRUCTION,
        labels: Sequence[Content] = (),
    ) -> None:
        self.rows = list(rows)
        known = Content.of(np.array(history, np.int32))
        items = [(row, Content.of(ITEMS[row])) for row in rows]
        self.prompt = make_prompt(
            known, instruction, items, PROBE if probe else None, key=user, room=SPAN, labels=labels
        )
        columns = np.array([30 + row for row in rows], np.int32)
        self.work = SegmentsWork(self.prompt, columns, columns * 0 + 12 if probe else None)

    def dense(self, method: Method) -> Float64:
        repair, prompt = method.repair, arrange(self.prompt, CAUSAL)
        lengths = [len(segment) for segment in prompt]
        of = np.repeat(np.arange(len(prompt)), lengths)
        within = np.concatenate([np.arange(n) for n in lengths])
        kind = np.array([segment.kind for segment in prompt])[of]
        number = np.array([segment.number for segment in prompt])[of]
        position = np.array([segment.offset for segment in prompt])[of] + within
        tokens = np.concatenate([segment.tokens for segment in prompt])
        place = np.arange(len(tokens))
        earlier, same = place[None, :] <= place[:, None], number[:, None] == number[None, :]
        item, probe = kind == Kind.ITEM, kind == Kind.PROBE
        plain = earlier & np.where((probe[:, None] & item[None, :]) | probe[None, :], same, True)

        alone = earlier & same & item[:, None] & item[None, :]
        kv = DENSE.run(tokens, position, alone | np.eye(len(tokens), dtype=bool))
        repaired = item & (within < repair.first)
        if repair.share:
            last = within >= np.array(lengths)[of] - repair.last
            repaired |= item & last
            may, total = item & ~repaired, int(item.sum())
            worth = self.worth(method.by, tokens, position, plain, kv)
            most = np.argsort(np.where(may, -worth, np.inf), kind="stable")
            repaired[most[: min(math.ceil(repair.share * total), int(may.sum()))]] = True
        rows = np.flatnonzero(repaired | ~item)
        h = DENSE.embed(tokens[rows])
        for layer in range(CFG.layers):
            q, *own = DENSE.project(layer, h, position[rows])
            k, v = (x.copy() for x in kv[layer])
            k[rows], v[rows] = own
            h = DENSE.step(layer, h, q, k, v, plain[rows])
        ends = np.flatnonzero(probe) if probe.any() else np.flatnonzero(kind == Kind.INSTRUCTION)[-1:]
        found = DENSE.logits(h[np.searchsorted(rows, ends)])
        of_probe = np.arange(len(self.rows)) if probe.any() else 0
        minus = 0 if self.work.negative_columns is None else found[:, 12]
        out: Float64 = found[of_probe, self.work.columns] - minus
        return out

    def worth(
        self,
        by: ChosenBy,
        tokens: npt.NDArray[np.int32],
        position: npt.NDArray[np.int64],
        plain: npt.NDArray[np.bool_],
        kv: list[tuple[Float64, Float64]],
    ) -> Float64:
        if by == "deviation":
            change = DENSE.run(tokens, position, plain)[1][1] - kv[1][1]
            deviation: Float64 = (change**2).sum((1, 2))
            return deviation
        q, k, _ = DENSE.project(0, DENSE.embed(tokens), position)
        k = np.repeat(k, CFG.heads // CFG.kv_heads, axis=1)
        scores = np.where(plain, np.einsum("thd,shd->hts", q, k) / math.sqrt(CFG.head_dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mass: Float64 = weights.sum((0, 1)) / plain.sum(0)
        return mass


@cache
def executor(chooses: bool, by: ChosenBy, last: int) -> PagedExecutor:
    page_bytes = 8 * CFG.layers * 2 * CFG.kv_heads * CFG.head_dim * 4
    kv = kv_cells(CacheConfig(cell_tokens=4), CFG, "float32", 4, page_bytes)
    made = PagedExecutor(
        CFG, PARAMS, TABLES, (PROFILE,), DevicePool(PAGES, page_bytes), kv, 64, "valid",
        repair=Repair(1, 0.5 if chooses else 0, True, last), chosen_by=by, moves=True,
    )  # fmt: skip
    made.warm_up(lambda done, total, label: None)
    return made


class Server(Driven):
    def __init__(self, method: Method, items: int = 16, users: int = 8) -> None:
        self.method = method
        made = executor(method.repair.share > 0, method.by, method.repair.last)
        super().__init__(made, PROFILE, "blocks", 120, items, users)

    def serve(
        self, *requests: Request, repair: Repair | None = None, fresh: bool = False
    ) -> list[tuple[PlannedPrompt, Float64]]:
        repair = repair or self.method.repair
        return self.score([(UnplannedPrompt(r.prompt, None, fresh, repair), r.work) for r in requests])


A = Request("a", range(12, 24), [3, 1, 2, 8])
B = Request("b", range(20, 26), [7, 6, 3, 5, 0])
PROBING = [Request("c", range(14, 21), [5, 2, 3], probe=True), Request("d", [33, 17], [8, 3, 6], probe=True)]


LABELLED = [
    Request("e", range(16, 22), [3, 1, 2, 8], labels=LABELS),
    Request("f", [13, 31], [5, 8], labels=LABELS),
]


def right(served: Sequence[tuple[PlannedPrompt, Float64]], method: Method, *requests: Request) -> None:
    for (_, found), request in zip(served, requests, strict=True):
        np.testing.assert_allclose(found, request.dense(method), atol=5e-5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_cold_warm_and_in_a_batch_score_as_defined(method: Method) -> None:
    server = Server(method)
    cold, partly, warm = server.serve(A), server.serve(B, A), server.serve(A)
    right(cold + partly + warm, method, A, B, A, A)
    for others in (PROBING, LABELLED):
        right(server.serve(*others) + server.serve(*others[::-1]), method, *others, *others[::-1])
    assert cold[0][0].cached_tokens == 0 < partly[0][0].cached_tokens < warm[0][0].cached_tokens
    assert warm[0][0].user.cached == 12, "a user who stands first is as everywhere"
    moved = [span for item in warm[0][0].items for span in item.spans if isinstance(span, Approximate)]
    lengths = np.cumsum([12, *(len(ITEMS[row]) for row in A.rows)]).tolist()
    assert {span.shift for span in moved} <= set(lengths[:-1]) and len(moved) >= 3


def test_the_methods_differ() -> None:
    scores = [A.dense(method) for method in (*METHODS.values(), Method(ALL_ITEM_TOKENS))]
    for at, one in enumerate(scores):
        assert all(abs(one - other).max() > 1e-3 for other in scores[:at])


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_random_traffic(method: Method) -> None:
    """More items and users than the pages hold, and more cached tokens than a batch does."""
    rng = np.random.default_rng(5)
    server = Server(method, items=2, users=3)
    for _ in range(8):
        requests = [
            Request(
                str(rng.integers(3)), range(12, 13 + rng.integers(1, 9)), rng.permutation(9)[:most].tolist()
            )
            for most in rng.integers(1, 6, 3)
        ]
        right(server.serve(*requests), method, *requests)
    assert server.meta.counts["item_evicted"] and server.meta.pinned == 0


@pytest.mark.parametrize(
    "method",
    [Method(Repair(SPAN, of_all=True)), Method(Repair(share=1.0)), RCLLM],
    ids=["first", "share", "asked"],
)
def test_all_of_it_is_the_prompt_computed_whole(method: Method) -> None:
    server, repair = Server(method), ALL_ITEM_TOKENS if method is RCLLM else None
    requests = [B, A, *PROBING, *LABELLED]
    whole = Method(ALL_ITEM_TOKENS)
    served = [server.serve(request, repair=repair)[0] for request in requests for _ in range(2)]
    right(served, whole, *[request for request in requests for _ in range(2)])
    again = server.serve(A, repair=ALL_ITEM_TOKENS, fresh=True)
    right(again, whole, A)
    assert again[0][0].computed_tokens == count_tokens(A.prompt), "nothing is computed twice"


def test_methods_mix_in_a_batch_and_quotas_are_exact() -> None:
    server = Server(RCLLM)
    repairs = [Repair(0, 0.5, True), Repair(2, 0.1, True), Repair(0, 0.0, True)]
    requests = [A, B, Request("e", [13, 14], [4, 1])]
    jobs = [
        Job(at, "rank", 100, len(request.rows), at, None, UnplannedPrompt(request.prompt, repair=repair))
        for at, (request, repair) in enumerate(zip(requests, repairs, strict=True))
    ]
    server.serve(*requests)
    group = server.scheduler.group(jobs, True, 9)
    assert group is not None and group.jobs == (0, 1, 2)
    items = [sum(len(ITEMS[row]) for row in request.rows) for request in requests]
    firsts = [sum(min(2, len(ITEMS[row])) for row in B.rows)]
    wanted = [math.ceil(0.5 * items[0]), firsts[0] + math.ceil(0.1 * items[1]), 0]
    assert [plan.repaired_tokens for plan in group.prompts] == wanted
    works = [
        replace(requests[job].work, plan=plan) for job, plan in zip(group.jobs, group.prompts, strict=True)
    ]
    for outcome, request, repair in zip(
        server.executor.run(group.profile, works), requests, repairs, strict=True
    ):
        assert isinstance(outcome, RankOutcome)
        np.testing.assert_allclose(outcome.scores, request.dense(Method(repair, "attention")), atol=5e-5)
    server.scheduler.finished(group.jobs, True)


def test_tokens_are_chosen_while_blocks_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of RcLLM's two programs the first reads no pool, so it is dispatched before the copies to that (RCLLM-13)."""
    server, order = Server(RCLLM), list[str]()
    made = server.executor
    catch_up, deciding, program = made.catch_up, made._deciding[PROFILE], made._programs[PROFILE]

    def seen(name: str, call: Any) -> Any:
        def record(*given: Any) -> Any:
            order.append(name)
            return call(*given)

        return record

    monkeypatch.setattr(made, "catch_up", seen("copies", catch_up))
    monkeypatch.setitem(made._deciding, PROFILE, seen("choose", deciding))
    monkeypatch.setitem(made._programs, PROFILE, seen("rest", program))
    right(server.serve(A), RCLLM, A)
    assert order == ["choose", "copies", "rest"]


def test_blocks_are_the_items_alone_wherever_they_were_computed() -> None:
    """What one prompt has written serves another one, and prompts whose items stand first (BAT-5)."""
    server = Server(RCLLM)
    server.serve(A)
    ((plan, _),) = server.serve(Request("z", range(30, 33), [8, 2, 1, 3]))
    lengths = [len(ITEMS[row]) for row in (8, 2, 1, 3)]
    assert [item.cached for item in plan.items] == [n - 1 for n in lengths], (
        "all but the tokens that are repaired"
    )
    by_items = UnplannedPrompt(A.prompt, "item_prefix")
    cached, found = one(server, by_items)
    assert cached.cached_tokens == sum(lengths)
    np.testing.assert_allclose(found, one(server, structs.replace(by_items, fresh=True))[1], atol=5e-5)


def one(server: Server, unplanned: UnplannedPrompt) -> tuple[PlannedPrompt, Float64]:
    """The plan and the scores of A's candidates in a prompt that is planned otherwise."""
    group = server.scheduler.group([Job(9, "rank", 60, 4, 9, None, unplanned)], True, 9)
    assert group is not None
    (found,) = server.executor.run(group.profile, [replace(A.work, plan=group.prompts[0])])
    server.scheduler.finished(group.jobs, True)
    assert isinstance(found, RankOutcome)
    return group.prompts[0], found.scores.astype(np.float64)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = (
        "cache.policy=blocks",
        "cache.repair_tokens=1",
        "cache.repair_share=0.25",
        "cache.repair_by=attention",
        "cache.max_drift=0.04",
    )
    server = Served(make_config(tmp_path_factory.mktemp("model"), *settings), ["rank"])
    yield server
    server.stop()


def test_an_answer_says_how_much_of_it_approximates(served: Served) -> None:
    history, candidates = ids(*range(4)), ids(20, 21, 22, 23)
    cold = served.rank("u", history, candidates)
    warm = served.rank("u", history, candidates)
    other = served.rank("v", history[::-1], candidates[::-1])
    assert warm["usage"]["layout"] == "causal"
    prompt = warm["usage"]["prompt_tokens"]
    # Items of two tokens: the first of each is repaired, and two of the other four.
    for answer, cached in ((cold, 0), (warm, 5 + 4), (other, 4)):
        usage = answer["usage"]
        assert (usage["cached_tokens"], usage["repaired_tokens"], usage["approximate_tokens"]) == (
            cached,
            6,
            2,
        )
    assert warm["usage"]["computed_tokens"] == prompt - 9 + 2
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4), "the answer does not depend on the cache"

    whole = served.rank("u", history, candidates, reuse_budget=1)
    usage = whole["usage"]
    assert (usage["approximate_tokens"], usage["repaired_tokens"], usage["computed_tokens"]) == (
        0,
        8,
        prompt - 5,
    )
    assert max(abs(scores(whole)[name] - score) for name, score in scores(warm).items()) > 1e-3
    least = served.rank("u", history, candidates, reuse_budget=0)
    assert least["usage"]["approximate_tokens"] == 4
    assert served.metrics("jgr_repair_drift_count")[0] > 0
    few, every = served.drifts(1e-4)
    assert few == every > 0, "computed without the cache it is the same"


def test_what_is_exported_of_approximate_answers_is_the_serving_versions() -> None:
    engine, other = null_engine(Config()), null_engine(Config())
    deployment, serving = Deployment(engine, Config().catalog), engine.served
    value = serving.metrics.registry.get_sample_value
    serving.watch.observe(0.5)
    serving.watch.fell_back = True
    loaded = ServedDecoder(serving.executors, serving.translator, Config(), serving.metrics)
    loaded.started()
    assert (value("jgr_repair_fell_back"), value("jgr_repair_disorder")) == (1, 0.5), "it is only loaded"
    deployment.engine = other
    assert (value("jgr_repair_fell_back"), value("jgr_repair_disorder")) == (0, 0)


def until(served: Served, candidates: list[str], whole: bool) -> dict[str, Any]:
    """Rank the candidates again and again until the answer is, or is not, computed whole: that answer."""
    for _ in range(500):
        answer = served.rank("drift", HISTORY, candidates)
        if answer["usage"].get("full_recompute", False) == whole:
            return answer
    raise AssertionError(f"after 500 requests: {served.metrics('jgr_repair_disorder')}")


HISTORY = ids(*range(4))
SAME = 0.2499
"""Repairs as many tokens as the server's own share, but is a request's wish, which does not count."""


def test_a_model_that_approximates_badly_falls_back_says_so_and_comes_back(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    drawn = [np.random.default_rng(at).permutation(30)[:10].tolist() for at in range(12)]
    taus, scored = list[float](), list[dict[str, float]]()
    for rows in drawn:
        both = [scores(served.rank("probe", HISTORY, ids(*rows), reuse_budget=r)) for r in (1, SAME)]
        whole, near = (np.array([found[name] for name in ids(*rows)]) for found in both)
        found = agreement(whole, near)
        assert found is not None
        taus.append(found.tau)
        scored.append(both[0])
    worst = int(np.argmin(taus))
    assert 1 - taus[worst] > 0.04, "the model must be wrong of some candidates"
    bad = ids(*drawn[worst])
    good = max(
        itertools.combinations(bad, 2), key=lambda two: abs(scored[worst][two[0]] - scored[worst][two[1]])
    )
    counted = (
        'jgr_repair_kendall_tau_bucket{le="0.95"}',
        "jgr_repair_kendall_tau_count",
        "jgr_repair_kl_count",
    )
    assert served.metrics("jgr_repair_fell_back") == [0]
    for _ in range(3 * FEWEST):
        named = served.rank("drift", HISTORY, bad, layout="item_prefix")
    assert named["usage"]["repaired_tokens"] > 0
    assert served.metrics("jgr_repair_fell_back", "jgr_repair_disorder") == [0, 0], "a caller's order"
    before = served.metrics(*counted)

    fell = until(served, bad, whole=True)
    assert scores(fell) == pytest.approx(scored[worst], abs=1e-4)
    assert (fell["usage"]["approximate_tokens"], fell["usage"]["repaired_tokens"]) == (0, 20)
    wish = served.rank("probe", HISTORY, bad, reuse_budget=0)
    assert wish["usage"]["full_recompute"], "whatever a request would have allowed"
    disorder, fell_back = served.metrics("jgr_repair_disorder", "jgr_repair_fell_back")
    assert disorder > 0.04 and fell_back == 1
    far, every, divergences = served.metrics(*counted)
    assert far - before[0] >= FEWEST / 2 and every - before[1] == divergences - before[2]

    back = until(served, list(good), whole=False)
    assert back["usage"]["repaired_tokens"] == 3, "the first of each, and one of the others"
    disorder, fell_back = served.metrics("jgr_repair_disorder", "jgr_repair_fell_back")
    assert disorder < 0.02 and fell_back == 0
    said = [record.getMessage() for record in caplog.records if "cache.max_drift" in record.getMessage()]
    assert len(said) == 2 and "computed whole" in said[0] and "approximated again" in said[1]


@pytest.mark.parametrize(
    "settings",
    [
        ("cache.policy=blocks", "cache.max_drift=0"),
        ("cache.policy=blocks", "cache.max_drift=2.5"),
        ("cache.policy=blocks", "cache.max_drift=nan"),
        ("cache.policy=blocks", "cache.max_drift=1", "cache.shadow=0"),
        ("cache.policy=hotness", "cache.max_drift=1"),
    ],
)
def test_a_limit_of_the_drift_that_cannot_be_kept_is_refused(settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"cache\.max_drift"):
        override(Config(), *settings)


@pytest.mark.parametrize("budget", [-0.1, 1.5, "much"])
def test_a_budget_beyond_all_and_nothing_is_refused(served: Served, budget: object) -> None:
    body = {"history": ids(1), "candidates": ids(2), "reuse_budget": budget}
    reply = served.call("/v1/rank", body)
    assert (reply.status, reply.json["error"]["field"]) == (422, "reuse_budget")


def test_a_budget_needs_a_server_that_reuses_what_stands_anywhere(tmp_path: Path) -> None:
    engine = load_engine(make_config(tmp_path, "cache.policy=item", "cache.repair_share=0.5"), kinds=["rank"])
    asked = RankRequest(history=[*ids(1)], candidates=[*ids(2)], reuse_budget=0.5)
    with pytest.raises(RequestError, match=r"cache\.policy=blocks") as refused:
        engine.served.translator.prepare(asked)
    assert (refused.value.type, refused.value.field) == ("invalid_request", "reuse_budget")
