# SPDX-License-Identifier: Apache-2.0
"""Lists that the model writes after prompts with reused blocks: each step by a dense decoder in numpy, for which the
letters that are written are the end of the instruction. (Whole prompts over HTTP: test_causal_ranking.py.)
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.pool import DevicePool
from jgr.config import CacheConfig
from jgr.models.packed import ChosenBy
from jgr.serving.decoders.caching import kv_cells
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.policies.sources import Repair, UnplannedPrompt
from tests.serving.decoders.driven import Driven
from tests.serving.decoders.test_blocks import (
    CFG,
    EPIC,
    INSTRUCTION,
    NAIVE,
    PAGES,
    PARAMS,
    PROFILE,
    TABLES,
    Float64,
    Method,
    Request,
)

ASKED = (("a", range(12, 24), (3, 1, 2, 8)), ("b", range(20, 26), (7, 6, 3, 5, 0)), ("c", (33, 17), (4,)))


@cache
def executor(chooses: bool, by: ChosenBy) -> PagedExecutor:
    page_bytes = 8 * CFG.layers * 2 * CFG.kv_heads * CFG.head_dim * 4
    kv = kv_cells(CacheConfig(cell_tokens=4), CFG, "float32", 4, page_bytes)
    made = PagedExecutor(
        CFG, PARAMS, TABLES, (PROFILE,), DevicePool(PAGES, page_bytes), kv, 64, "valid",
        repair=Repair(1, 0.5 if chooses else 0, True), chosen_by=by, moves=True, lists=True,
    )  # fmt: skip
    made.warm_up(lambda done, total, label: None)
    return made


def letters(request: Request) -> npt.NDArray[np.int32]:
    """The labels of the request's candidates: those of its work, whatever the places."""
    return request.work.columns


def written(user: str, history: object, rows: object, method: Method) -> Float64:
    """The score of every candidate by the dense decoder."""
    left, text = list(range(len(rows))), INSTRUCTION  # type: ignore[arg-type]
    found = np.zeros(len(left))
    while left:
        request = Request(user, history, rows, instruction=text)  # type: ignore[arg-type]
        shown = request.dense(method)[left]
        best = int(shown.argmax())
        weights = np.exp(shown - shown.max())
        found[left[best]] = len(left) - 1 + weights[best] / weights.sum()
        text = np.append(text, letters(request)[left.pop(best)]).astype(np.int32)
    return found


@pytest.mark.parametrize("method", [NAIVE, EPIC], ids=["naive", "epic"])
def test_cold_warm_and_in_a_batch_lists_are_written_as_defined(method: Method) -> None:
    server = Driven(executor(False, "deviation"), PROFILE, "blocks", 120, 16, 8)
    requests = [Request(*asked) for asked in ASKED]
    wanted = [written(*asked, method) for asked in ASKED]
    for some in ([0], [1, 0, 2], [2, 1], [0]):
        given = [UnplannedPrompt(requests[at].prompt, None, False, method.repair) for at in some]
        served = server.score([(one, requests[at].work) for one, at in zip(given, some, strict=True)])
        for (_, found), at in zip(served, some, strict=True):
            np.testing.assert_allclose(found, wanted[at], atol=5e-5)
            assert np.argsort(-found).tolist() == np.argsort(-wanted[at]).tolist()
    assert served[0][0].cached_tokens > 0


@pytest.mark.parametrize("by", ["attention", "deviation"])
def test_tokens_that_the_program_chooses_are_read_by_the_list(by: ChosenBy) -> None:
    """The first letter is the best of the plain scores; with all tokens repaired the list is the whole prompt's."""
    server = Driven(executor(True, by), PROFILE, "blocks", 120, 16, 8)
    request = Request(*ASKED[1])
    some, every = Repair(1, 0.3, True), Repair(share=1.0, of_all=True)
    for repair in (some, some, every):
        given = UnplannedPrompt(request.prompt, None, False, repair)
        ((_, found),) = server.score([(given, request.work)])
        assert int(found.argmax()) == int(request.dense(Method(repair, by)).argmax())
    np.testing.assert_allclose(found, written(*ASKED[1], Method(every)), atol=5e-5)
