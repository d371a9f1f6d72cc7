# SPDX-License-Identifier: Apache-2.0
"""The scheduler over a naive model of the cache: sources, caps, pins, in any order of events."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.prompt.layouts import LayoutName
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prefix_choice import Policy
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.sources import (
    Approximate,
    Compute,
    Near,
    PlannedPrompt,
    Repair,
    Reuse,
    UnplannedPrompt,
)

PROFILES = [Profile("rank", 3, tokens, 12, packed=True, context=24) for tokens in (16, 40)]
ITEM_TOKENS = [1, 2, 3, 4, 2, 1]


def make(policy: Policy, pages: int = 6, max_tokens: int = 30, host_pages: int = 0) -> PromptScheduler:
    hotness = ExponentialWindow(50, 20) if policy == "hotness" else None
    rooms = {"user": Room(4, step=4), "item": Room(2, step=2)}  # a byte a token; a user takes whole pages
    meta = CacheMeta(Pages(pages, 4), rooms, hotness, Pages(host_pages, 4) if host_pages else None)
    meta.set_limit("item", pages // 2)
    meta.set_limit("user", pages - pages // 2)
    return PromptScheduler(PROFILES, meta, max_tokens=max_tokens, policy=policy, hysteresis=0.0)


def job(
    number: int, user: str, history: list[int], items: list[int], layout: LayoutName | None = None
) -> Job:
    contents = [(row, Content.of(np.full(ITEM_TOKENS[row], row, np.int32))) for row in items]
    known = Content.of(np.array(history, np.int32))
    prompt = make_prompt(known, np.zeros(1, np.int32), contents, key=user, room=4)
    tokens = len(history) + sum(ITEM_TOKENS[row] for row in items) + 1
    return Job(number, "rank", tokens, len(items), number, None, UnplannedPrompt(prompt, layout))


def plan(scheduler: PromptScheduler, *jobs: Job) -> Any:
    return scheduler.group(jobs, True, jobs[-1].arrival_ns, None)


def test_what_a_batch_writes_is_reused_by_the_next() -> None:
    scheduler = make("item")
    first = plan(scheduler, job(0, "a", [1] * 4, [0, 3]), job(1, "b", [2] * 4, [3, 5]))
    assert first.jobs == (0, 1)
    cold, other = first.prompts
    assert [segment.write is not None for segment in cold.items] == [True, True]
    assert [segment.write is not None for segment in other.items] == [False, True], "item 3 is written once"
    assert (cold.computed_tokens, cold.cached_tokens) == (10, 0)
    scheduler.check()
    scheduler.finished(first.jobs, well=True)
    (warm,) = plan(scheduler, job(2, "c", [3] * 4, [3, 0])).prompts
    assert (warm.cached_tokens, warm.computed_tokens) == (5, 5)
    assert warm.items[0].spans == (Reuse(4, cold.items[1].write),)
    scheduler.finished((2,), well=True)
    scheduler.check()


def test_what_a_failed_batch_should_have_written_is_not_reused() -> None:
    scheduler = make("user")
    group = plan(scheduler, job(0, "a", [1] * 4, [0]))
    scheduler.finished(group.jobs, well=False)
    (again,) = plan(scheduler, job(1, "a", [1] * 4, [0])).prompts
    assert again.cached_tokens == 0 and again.user.write is not None


def test_the_cap_is_on_new_tokens_and_a_long_request_runs_alone() -> None:
    scheduler = make("none", max_tokens=30)
    jobs = [job(0, "a", [1] * 14, [0]), job(1, "b", [1] * 12, [0]), job(2, "c", [1] * 20, [3])]
    assert plan(scheduler, *jobs).jobs == (0, 1), "16 + 14 = 30"
    assert plan(scheduler, jobs[2], jobs[0]).jobs == (2,)
    long = job(3, "d", [1] * 35, [3])
    group = plan(scheduler, long, jobs[0])
    assert (group.jobs, group.profile.tokens) == ((3,), 40), "40 tokens are beyond the cap"


def test_a_batch_waits_for_company_unless_it_is_full() -> None:
    scheduler = make("user")
    waiting = [job(number, "a", [1, 2], [0]) for number in range(3)]
    assert scheduler.group(waiting[:2], False, 9, None) is None
    scheduler.check()
    assert scheduler.group(waiting, False, 9, None) is not None, "no profile takes a fourth request"


def test_no_more_is_reused_than_the_shapes_take() -> None:
    scheduler = make("user", pages=40)
    history = list(range(30))
    for number in range(2):
        group = plan(scheduler, job(number, "a", history, [0]))
        scheduler.finished(group.jobs, well=True)
    assert group.prompts[0].cached_tokens == 24
    assert group.prompts[0].user.write is None


def test_causal_order_reuses_the_users_part_and_computes_the_items() -> None:
    scheduler = make("user")
    cold = plan(scheduler, job(0, "a", [1] * 4, [3, 0]))
    assert cold.prompts[0].layout == "user_prefix" and cold.prompts[0].user.write is not None
    scheduler.finished(cold.jobs, well=True)
    (warm,) = plan(scheduler, job(1, "a", [1] * 4, [3, 0], "causal")).prompts
    cells = cold.prompts[0].user.write
    assert warm.layout == "causal"
    assert warm.user.spans == (Reuse(4, cells),), "it stands at the same positions and sees the same"
    assert [item.spans for item in warm.items] == [(Compute(4),), (Compute(1),)]
    assert (warm.cached_tokens, warm.computed_tokens) == (4, 6)
    scheduler.finished((1,), well=True)


def of_one_item(number: int, text: list[int], repair: Repair, near: Near | None = None) -> Job:
    content = Content.of(np.array(text, np.int32))
    known = Content.of(np.arange(4, dtype=np.int32))
    prompt = make_prompt(known, np.zeros(1, np.int32), [(3, content)], key=f"u{number % 2}", room=8)
    layout: LayoutName = "causal" if repair.of_all else "item_prefix"
    unplanned = UnplannedPrompt(prompt, layout, repair=repair, near=near)
    return Job(number, "rank", 5 + len(text), 1, number, None, unplanned)


@pytest.mark.parametrize("repair", [Repair(1, of_all=True), Repair(of_all=True), Repair(3)])
def test_a_text_that_goes_on_where_another_ended_is_no_addition_to_it(repair: Repair) -> None:
    """What is added would see the user, or be shorter than what is computed anew."""
    scheduler = make("blocks" if repair.of_all else "item", pages=12)
    short = plan(scheduler, of_one_item(0, [11, 12], repair))
    scheduler.finished(short.jobs, well=True)
    (long,) = plan(scheduler, of_one_item(1, [11, 12, 13, 14, 15], repair)).prompts
    (item,) = long.items
    assert (item.alone, item.cached, item.write is not None) == (repair.of_all, 0, True)
    assert [type(span) for span in item.spans] == [Compute] and item.spans[0].tokens == 5
    scheduler.finished((1,), well=True)
    (warm,) = plan(scheduler, of_one_item(2, [11, 12, 13, 14, 15], repair)).prompts
    kept = [span for span in warm.items[0].spans if isinstance(span, Reuse | Approximate)]
    assert sum(span.tokens for span in kept) == (5 - repair.first if repair.of_all else 5)
    scheduler.finished((2,), well=True)
    scheduler.check()


def test_tokens_of_a_history_that_is_read_are_not_repaired() -> None:
    scheduler = make("blocks", pages=12)
    repair, near = Repair(1, of_all=True), Near((), selected=3)
    cold = plan(scheduler, of_one_item(0, [11, 12], repair, near))
    scheduler.finished(cold.jobs, well=True)
    warm = plan(scheduler, of_one_item(2, [11, 12], repair, near))
    assert (cold.prompts[0].repaired_tokens, warm.prompts[0].repaired_tokens) == (4, 1)
    assert warm.prompts[0].user.cached == 4
    scheduler.finished(warm.jobs, well=True)


@pytest.mark.parametrize("policy", ["none", "item"])
def test_causal_order_is_computed_whole_where_users_are_not_cached(policy: Policy) -> None:
    scheduler = make(policy)
    for number in range(2):
        group = plan(scheduler, job(number, "a", [1] * 4, [3, 0], "causal"))
        assert (group.prompts[0].cached_tokens, group.prompts[0].computed_tokens) == (0, 10)
        assert not any(segment.write for segment in group.prompts[0].segments)
        scheduler.finished(group.jobs, well=True)


@pytest.mark.parametrize("policy", ["none", "user", "item", "cache_agnostic", "hotness"])
@given(data=st.data())
def test_any_interleaving(policy: Policy, data: st.DataObject) -> None:
    """Through the batcher, with cancellations, failures and erasures; two batches at a time."""
    scheduler = make(policy)
    batcher = Batcher(
        [], max_tokens=30, max_wait_ns=3, max_queue=8, in_flight=2, groupings={"rank": scheduler}
    )
    running: list[Any] = []
    for now in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["submit", "submit", "plan", "commit", "cancel", "forget"]))
        if event == "submit":
            history = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=20))
            items = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
            layout = data.draw(st.sampled_from([None, None, "causal"]))
            batcher.submit(job(now, data.draw(st.sampled_from("abc")), history, items, layout), now)
        elif event == "plan":
            for start in batcher.plan(now).starts:
                running.append(start)
                prompts = [request.plan for request in start.work]
                used = sum(prompt.computed_tokens for prompt in prompts)
                assert used <= start.shape.tokens and (len(start.jobs) == 1 or used <= 30)
                assert sum(prompt.cached_tokens for prompt in prompts) <= start.shape.context
                assert msgspec.json.decode(msgspec.json.encode(prompts), type=list[PlannedPrompt]) == prompts
        elif event == "commit" and running:
            start = running.pop(data.draw(st.integers(0, len(running) - 1)))
            batcher.commit(start.run, data.draw(st.sampled_from(("well", "failed", "lost"))), now)
        elif event == "cancel":
            batcher.cancel(data.draw(st.integers(0, 25)), now)
        elif event == "forget":
            scheduler._meta.drop(Name("user", data.draw(st.sampled_from("abc")), "user_prefix"))
        batcher.check()
        assert (scheduler._meta.pinned > 0) <= bool(running), "an entry is pinned by no batch"
    for start in running:
        batcher.commit(start.run, "well", 99)
    batcher.check()
    assert scheduler._meta.pinned == 0
    scheduler._meta.clear()
    assert scheduler._meta.pages.free == scheduler._meta.pages.count


def test_who_comes_for_the_first_time_takes_nobodys_place() -> None:
    serve_users(make("hotness", pages=8))  # four for users, of four tokens each


def test_the_hosts_room_admits_who_comes_for_the_first_time() -> None:
    """The same answers where a device with room for one user has a host with room for three."""
    scheduler = make("hotness", pages=2, host_pages=3)
    serve_users(scheduler)
    assert scheduler._meta.number("user") == 1
    on_device = next(name.id for name in scheduler._meta.names("user"))
    for user in "bcde":
        assert not scheduler.would_read_items("", user, 4, 3, 100)
        assert user == on_device or scheduler._meta.by_name(Name("user", user, "user_prefix")) is None
    assert scheduler.would_read_items("", "a", 4, 3, 100)


def serve_users(scheduler: PromptScheduler) -> None:
    came = [
        "a user",
        "b item",
        "b user",
        "c item",
        "c user",
        "d item",
        "d user",
        "e item",
        "e user",
        "a item",
    ]
    for number, (user, layout) in enumerate(map(str.split, [*came, "e user"])):
        group = plan(scheduler, job(10 * number, user, [ord(user)] * 4, [0]))
        assert group.prompts[0].layout == f"{layout}_prefix", (number, user)
        scheduler.finished(group.jobs, well=True)


def test_who_cannot_be_cached_is_not_put_first() -> None:
    scheduler = make("hotness")
    scheduler._meta.set_limit("user", 0)
    for number in range(4):
        group = plan(scheduler, job(number, "a", [1] * 4, [0]))
        assert group.prompts[0].layout == "item_prefix"
        scheduler.finished(group.jobs, well=True)
    assert group.prompts[0].cached_tokens == 1
