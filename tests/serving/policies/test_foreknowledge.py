# SPDX-License-Identifier: Apache-2.0
"""What is kept of a user when a job comes counts in what is promised to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec import structs

from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.prompt.segments import Content, make_prompt
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Accepted, Job, Kept, Profile, Rejected, UserPart
from jgr.serving.policies.orchestration import GROWN, KEPT, USER_PART, Orchestrator
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.run_costs import RunCosts
from jgr.serving.policies.sources import UnplannedPrompt
from jgr.serving.policies.user_cache import UserCache, WholeContent

MS = 1_000_000
TOOK_MS = {USER_PART: 40, 16: 10, KEPT: 1, GROWN: 5}


@dataclass
class Device:
    """Runs of a scorer one after the other; the user's part by how it is kept."""

    kept: int = 1  # users that fit
    now_ns: int = 0
    meta: CacheMeta = field(init=False)
    policy: Orchestrator = field(init=False)

    def __post_init__(self) -> None:
        self.meta = CacheMeta(Pages(4 * self.kept, 1), {"user": Room(1)})
        costs = {size: ms / 1e3 for size, ms in TOOK_MS.items() if isinstance(size, int)}
        users = UserCache(self.meta, Prefixed, growth=2)
        self.policy = Orchestrator([0, 16], costs, max_queue=99, streams=1, users=users)

    def ask(self, number: int, history: bytes, in_ms: int) -> Accepted | Rejected:
        self.now_ns += 10_000 * MS
        user = UserPart("u", history)
        job = Job(number, "rank", 0, 16, self.now_ns, self.now_ns + in_ms * MS, user=user)
        verdict = self.policy.submit(job, self.now_ns)
        while starts := self.policy.plan(self.now_ns).starts:
            for start in starts:
                self.now_ns += TOOK_MS[self.policy._flights[start.run].cost] * MS  # type: ignore[index]
                self.policy.commit(start.run, "well", self.now_ns)
        self.policy.check()
        return verdict


class Prefixed(WholeContent):
    """A history of single bytes; what is kept of the first of them is the first of what is kept of all."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def prefix(self, count: int) -> bytes:
        return WholeContent(self._data[:count]).digest


def predicted_ms(verdict: Accepted | Rejected, device: Device, before_ns: int) -> float:
    assert verdict.predicted_ns is not None
    return (verdict.predicted_ns - before_ns - 10_000 * MS) / MS


def test_a_kept_user_is_promised_what_reading_it_takes() -> None:
    device = Device()
    assert isinstance(device.ask(0, b"abc", 500), Accepted)
    told = []
    for number in range(1, 4):
        before_ns = device.now_ns
        told.append(predicted_ms(device.ask(number, b"abc", 45), device, before_ns))
    assert told == pytest.approx([10, 11, 11], abs=0.5), "the first of them shows what reading takes"


def test_a_user_that_grows_is_promised_the_whole_part_until_one_has_grown() -> None:
    device = Device()
    device.ask(0, b"abc", 500)
    told = []
    for number, history in enumerate((b"abcd", b"abcde", b"zzzzz"), start=1):
        before_ns = device.now_ns
        told.append(predicted_ms(device.ask(number, history, 500), device, before_ns))
    assert told == pytest.approx([50, 15, 50], abs=0.5), "another history is a new user"


def test_who_it_is_is_not_known_before_a_request_is_read_so_the_best_is_hoped() -> None:
    device = Device()
    device.ask(0, b"abc", 500)
    device.ask(1, b"abc", 500)
    policy, now_ns = device.policy, device.now_ns
    running = Job(8, "rank", 0, 16, now_ns, None, user=UserPart("v", b"x"))
    policy.submit(running, now_ns)
    policy.plan(now_ns)
    like = Job(-1, "rank", 0, 16, now_ns, now_ns + 75 * MS, user=UserPart("w", b"y"))
    assert policy.refuses(like, now_ns) is None
    assert policy.refuses(structs.replace(like, deadline_ns=now_ns + 55 * MS), now_ns) is not None
    new = structs.replace(like, id=9)
    assert isinstance(policy.submit(new, now_ns), Rejected), "a new user takes 50 ms behind the other's 50"


KINDS: tuple[Kept, ...] = ("", "kept", "grown")


@pytest.mark.parametrize("kept", KINDS)
def test_asking_what_is_kept_changes_nothing(kept: Kept) -> None:
    cache = UserCache(CacheMeta(Pages(8, 1), {"user": Room(1)}), Prefixed, growth=2)
    found = cache.find(UserPart("u", b"abc"))
    assert found is not None
    assert cache.kept(UserPart("u", b"abc")) == "", "it is being written"
    cache.end(found, well=True)
    before = dict(cache.meta.counts)
    history = {"": b"abxd", "kept": b"ab", "grown": b"abcde"}[kept]
    assert cache.kept(UserPart("u", history)) == kept
    assert cache.kept(UserPart("other", b"abc")) == ""
    assert dict(cache.meta.counts) == before and cache.holds(UserPart("u", b"abc"))
    cache.check()


def test_a_decoder_promises_a_kept_user_its_new_tokens_alone() -> None:
    profiles = {Profile("rank", 4, tokens, 8, packed=True, context=64): tokens / 1e3 for tokens in (16, 64)}
    meta = CacheMeta(Pages(64, 4), {"user": Room(4, step=4), "item": Room(2, step=2)}, None, None)
    meta.set_limit("user", 64)
    scheduler = PromptScheduler(list(profiles), meta, max_tokens=64, policy="user")
    b = Batcher(
        [], max_tokens=64, max_wait_ns=0, max_queue=9, groupings={"rank": scheduler}, costs=RunCosts(profiles)
    )

    def ask(number: int, user: int, at_ns: int) -> Job:
        known = Content.of(np.full(40, user, np.int32))
        items = [(row, Content.of(np.full(2, row, np.int32))) for row in range(3)]
        prompt = make_prompt(known, np.zeros(1, np.int32), items, key=str(user), room=4)
        return Job(number, "rank", 47, 3, at_ns, at_ns + 10**9, UnplannedPrompt(prompt, None))

    now_ns, told = 0, []
    for number, user in enumerate((1, 1, 2, 1, 2)):
        now_ns += 10**9
        verdict = b.submit(ask(number, user, now_ns), now_ns)
        assert isinstance(verdict, Accepted) and verdict.predicted_ns is not None
        told.append((verdict.predicted_ns - now_ns) / MS)
        (start,) = b.plan(now_ns).starts
        now_ns += run_ms(start.shape) * MS
        b.commit(start.run, "well", now_ns)
        b.check()
    assert told == [64, 16, 64, 16, 16], "seven new tokens where the user is kept"


def run_ms(shape: Profile | int) -> int:
    assert isinstance(shape, Profile)
    return shape.tokens
