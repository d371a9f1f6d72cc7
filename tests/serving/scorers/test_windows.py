# SPDX-License-Identifier: Apache-2.0
"""Programs for several lengths of history: the shortest that hold a user score as the longest do."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.entries import Stored
from jgr.cache.histories import HistoryView
from jgr.cache.pool import DevicePool
from jgr.config import Config, ConfigError, override
from jgr.models import climber, scorers
from jgr.models.climber import ClimberConfig
from jgr.models.hstu import HstuConfig
from jgr.models.lru_rec import LruRecConfig
from jgr.models.params import PyTree
from jgr.models.retrievers import RetrieverConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.scorers.executors import Executor, PartWork, Programs, Read, ReadWork
from jgr.serving.scorers.programs import UserPrograms, Window
from jgr.serving.scorers.user_block import new_block
from tests.serving.scorer_fakes import DAY, HSTU, ITEMS, N_ITEMS, STU, ScorerServer, draw, make_folder
from tests.serving.scorers.test_growth import GROWING_STU
from tests.serving.scorers.test_kept_users import CLIMBER, SASREC, body
from tests.serving.scorers.test_server import directly

GROWTH, PLACES = 2, 6
EVENTS = np.random.default_rng(4).integers(0, N_ITEMS, PLACES)
FAMILIES: dict[str, ScorerConfig] = {
    "hstu": HSTU,
    "stu": STU,
    "sasrec": SASREC,
    "lrurec": LruRecConfig(n_items=N_ITEMS, max_items=PLACES, hidden=8, layers=1, mlp=8, items=SASREC.items),
    "climber": CLIMBER,
}


def without(body: dict[str, Any], fields: set[str]) -> dict[str, Any]:
    """A request that says nothing which the model does not read."""
    return {name: value for name, value in body.items() if name not in fields}


@dataclass(eq=False)
class Ranker:
    """A user's part, and candidates. keeps: the part stands in cells of a pool of its own."""

    cfg: ScorerConfig
    params: PyTree
    lengths: tuple[int, ...]
    keeps: bool = True

    def __post_init__(self) -> None:
        self.growth = 0 if isinstance(self.cfg, ClimberConfig) else GROWTH
        made = self.programs = Programs(
            self.cfg, self.params, (8,), "cache", None, self.growth, lengths=self.lengths
        )
        for size in made.layouts:
            made.compile(size)
        tokens = [window.tokens for window in made.windows if window.tokens is not None]
        self.view = HistoryView(DevicePool(16, 1024), made.kept, made.along, 1, self.growth, tokens)
        self.user = Executor(made, USER_PART, self.view if self.keeps else None)
        self.part = Executor(made, 8, None)

    def read(self, events: int, known: int = 0, *, kept: bool = False, now: int = 7 * DAY) -> Read:
        """The user's first so many events, from what stands in the cells of some of them. kept: of all of them."""
        block, views = new_block(self.programs.user)
        views["rows"][:events] = EVENTS[:events]
        views["times"][:events] = 1000 * np.arange(events)
        views["now"][0] = now
        if "actions" in views:
            views["actions"][:events] = EVENTS[:events] % 8
        tokens = min(events, self.view.longest)
        cells = tuple(range(self.view.room.of(tokens)))
        before = Stored(cells, 0, False, known) if known else None
        found: Read = self.user.run(ReadWork(block, Stored(cells, 0, not kept, tokens, known), before))
        return found

    def scores(self, state: PyTree) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = self.part.run(PartWork(np.arange(8, dtype=np.int32), state))
        return found


@pytest.mark.parametrize(
    ("cfg", "lengths"),
    [(HSTU, (3,)), (GROWING_STU, (3,)), (dataclasses.replace(CLIMBER, layers=1), (2,))],
    ids=["hstu", "stu", "climber"],
)
def test_users_of_any_length_are_scored_as_by_the_programs_for_the_longest(
    cfg: ScorerConfig, lengths: tuple[int, ...]
) -> None:
    params = draw(cfg)
    several, one = Ranker(cfg, params, lengths), Ranker(cfg, params, (PLACES,), keeps=False)
    assert [window.events for window in several.programs.windows] == [*lengths, PLACES]
    assert len(one.programs.windows) == 1

    def compare(events: int, now: int = 7 * DAY, **given: Any) -> None:
        found, wanted = several.read(events, now=now, **given), one.read(events, now=now)
        assert (
            found.cached == ("all" if given.get("kept") else "before" if given else "nothing") and found.kept
        )
        assert wanted.cached == "nothing"
        np.testing.assert_allclose(several.scores(found.state), one.scores(wanted.state), atol=1e-5, rtol=0)

    for events in range(1, PLACES + 1):
        compare(events)  # it writes what a later read finds
        compare(events, kept=True, now=8 * DAY)
    if several.growth:
        compare(1)
        # Within a window, to its edge, over it, and within the longest.
        for known, events in itertools.pairwise((1, 2, 3, 5, 6)):
            compare(events, known=known)
            compare(events, kept=True, now=9 * DAY)
            compare(known, kept=True)  # one who asks with fewer events


def test_a_short_user_is_read_in_small_arrays_and_a_size_has_a_program_for_each_shape_of_state() -> None:
    stu = Ranker(GROWING_STU, draw(GROWING_STU), (3,), keeps=False)
    assert [stu.read(events).state.past.k.shape[3] for events in (1, 3, 4, 6)] == [3, 3, 6, 6]
    assert stu.programs.forms == 2
    states = [stu.read(events).state for events in (3, 4)]
    small, large = (stu.programs.part(8, state) for state in states)
    assert small is not large and stu.programs[8] is large
    assert small.cost_analysis()["flops"] < large.cost_analysis()["flops"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", ["request", "cache"])
@pytest.mark.parametrize("name", FAMILIES)
def test_over_http_a_short_user_is_computed_in_the_shortest_program_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: str
) -> None:
    """Scores are compared with `read` and `score` of the whole window, which know of no programs."""
    cfg, used = FAMILIES[name], list[int]()
    unread = {"history_actions"} if isinstance(cfg, get_args(RetrieverConfig)) else set()
    if isinstance(cfg, SasrecConfig | LruRecConfig):
        unread |= {"history_times", "time"}

    def noting(self: Programs, window: Window) -> UserPrograms:
        used.append(window.events)
        return user_part(self, window)

    user_part = Programs.user_part
    sizes = [8] if name in ("stu", "climber") else [4, 8]  # their programs are the dearest
    settings = (
        f"executors.share_user={share}",
        "executors.history_lengths=2",
        "cache.device_mb=0.1",
        f"executors.sizes={','.join(map(str, sizes))}",
    )
    with ScorerServer(make_folder(tmp_path / "model", cfg, *settings)) as server:
        executors = server.engine.served.executors  # type: ignore[union-attr]
        assert list(executors.shorter) == [2]
        assert executors.shorter[2].keys() == executors.costs.keys() == {USER_PART, *sizes}
        assert executors.whole.keys() == (set(sizes) if share == "request" else set())
        monkeypatch.setattr(Programs, "user_part", noting)
        before = server.metric('jgr_compilations_total{phase="request"}')
        bodies = [body(cfg, events, user_id=f"u{events}") for events in range(1, PLACES + 1)]
        answers = [server.rank(**without(asked, unread)) for asked in bodies]  # each in more than one part
        assert server.metric('jgr_compilations_total{phase="request"}') == before
        assert server.metric('jgr_parts_total{size="0"}') == PLACES
    assert used == [2, 2, 6, 6, 6, 6]
    for asked, answer in zip(bodies, answers, strict=True):
        rows = [ITEMS.index(item["item_id"]) for item in answer["items"]]
        found = [list(item.get("scores", {"": item["score"]}).values()) for item in answer["items"]]
        np.testing.assert_allclose(found, directly(cfg, asked)[rows], atol=1e-6, rtol=1e-6)


def test_which_lengths_there_are() -> None:
    long = HstuConfig(**{**vars(HSTU), "max_items": 2048, "length": 2059})
    assert scorers.windows(long) == (256, 512, 1024, 2048)
    assert scorers.windows(HstuConfig(**{**vars(HSTU), "max_items": 200})) == (100, 200)
    assert scorers.windows(HSTU) == (6,)
    assert scorers.windows(long, (100, 3000)) == (100, 2048)
    assert scorers.windows(climber.LONG) == (64, 128, 256, 1024)  # its two parts have 512 places
    kept = override(Config(), "executors.share_user=cache")
    for wrong in ("executors.history_lengths=9,3", "executors.history_lengths=1,2,3,4,5,6,7,8,9"):
        with pytest.raises(ConfigError, match="history_lengths"):
            override(kept, wrong)
    assert override(Config(), "executors.history_lengths=3").executors.share_user == "request"
    with pytest.raises(ConfigError, match="history_lengths: at most 8, and none"):
        override(Config(), "executors.history_lengths=3", "executors.share_user=part")
