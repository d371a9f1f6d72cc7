# SPDX-License-Identifier: Apache-2.0
"""Candidates in causal order, over real HTTP: the scores of a plain forward of the whole text, cached or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jgr.prompt.tokens import Tokenizer
from tests.serving.decoders.dense import Dense
from tests.serving.decoders.test_cached_server import Served, ids, make_config, scores

METHODS = {
    "item_token": (),
    "item_probe": ("rank.probe=<sid><bos>", "rank.positive=<a_1>", "rank.negative=<a_2>"),
    "list_letter": ("rank.letters=<a_{n}>",),
    "labelled": ("rank.method=list_letter", "rank.letters=<a_{n}>", "rank.label=<a_{n}>"),
    "list_generation": ("rank.letters=<a_{n}>",),
}
HISTORY, ROWS = list(range(12)), [20, 21, 3, 22]


@pytest.fixture(scope="module", params=METHODS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = METHODS[request.param]
    if request.param != "labelled":
        settings = (f"rank.method={request.param}", *settings)
    server = Served(make_config(tmp_path_factory.mktemp("model"), *settings), ["rank"])
    server.method, server.tokenizer = request.param, _tokenizer(server)  # type: ignore[attr-defined]
    yield server
    server.stop()


def _tokenizer(server: Served) -> Tokenizer:
    return Tokenizer.from_file(server.config.model.path + "/tokenizer.json")


def written_out(server: Any, rows: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The prompt as text is read: its tokens, the end of the history, and the ends of the items."""
    names = ["<bos>", *(f"<a_{row}>" for row in HISTORY)]
    ends = [len(names)]
    for at, row in enumerate(rows):
        label = [f"<a_{at}>"] if server.method == "labelled" else []
        names += [*label, "<sid>", f"<a_{row}>"]
        ends.append(len(names))
    names.append("<sid>")
    return [server.tokenizer.token_id(name) for name in names], ends[:1], ends[1:]


def plain(server: Any, rows: list[int]) -> dict[str, float]:
    """The scores of a dense causal forward. A probe goes on from the whole text, but sees its own item alone."""
    paged = server.engine.served.executors.paged
    dense = Dense(paged._cfg, paged._params)
    tokens, (begin,), ends = written_out(server, rows)
    column = {n: server.tokenizer.token_id(f"<a_{n}>") for n in range(30)}
    mask = np.tri(len(tokens), dtype=bool)
    if server.method == "list_generation":
        return {f"i{rows[at]}": score for at, score in written_list(dense, tokens, column, len(rows)).items()}
    if server.method != "item_probe":
        _, logits = dense.forward(tokens, np.arange(len(tokens)), mask)
        asked = rows if server.method == "item_token" else range(len(rows))
        return {f"i{row}": logits[-1, column[of]] for row, of in zip(rows, asked, strict=True)}
    probe = [server.tokenizer.token_id(name) for name in ("<sid>", "<bos>")]
    found = {}
    for row, start, end in zip(rows, [begin, *ends], ends, strict=False):
        text = tokens + probe
        mask: npt.NDArray[np.bool_] = np.tri(len(text), dtype=bool)
        mask[len(tokens) :, begin:start] = mask[len(tokens) :, end : ends[-1]] = False
        _, logits = dense.forward(text, np.arange(len(text)), mask)
        found[f"i{row}"] = logits[-1, column[1]] - logits[-1, column[2]]
    return found


def written_list(dense: Dense, tokens: list[int], column: dict[int, int], count: int) -> dict[int, float]:
    """The best letter, then the best of the others with that one read, and so on: each one's score by its place."""
    text, found = list(tokens), dict[int, float]()
    while len(found) < count:
        left = [at for at in range(count) if at not in found]
        logits = dense.forward(text, np.arange(len(text)), np.tri(len(text), dtype=bool))[1][-1]
        shown = np.array([logits[column[at]] for at in left])
        best = int(shown.argmax())
        weights = np.exp(shown - shown.max())
        found[left[best]] = len(left) - 1 + weights[best] / weights.sum()
        text.append(column[left[best]])
    return found


def test_the_scores_are_those_of_a_plain_forward(server: Any) -> None:
    cold = server.rank("u", ids(*HISTORY), ids(*ROWS), layout="causal")
    assert scores(cold) == pytest.approx(plain(server, ROWS), abs=1e-4)
    assert (cold["usage"]["layout"], cold["usage"]["cached_tokens"]) == ("causal", 0)
    warm = server.rank("u", ids(*HISTORY), ids(*ROWS), layout="causal")
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4)
    usage = warm["usage"]
    assert (usage["cached_tokens"], usage["computed_tokens"]) == (13, usage["prompt_tokens"] - 13)
    parts = [(part["segment"], part.get("item_id"), part["cached_tokens"]) for part in warm["explain"]]
    assert parts == [("user", None, 13), *(("item", f"i{row}", 0) for row in ROWS)]


def test_an_item_sees_those_before_it_and_no_other_layout_says_the_same(server: Any) -> None:
    turned = ROWS[::-1]
    answer = server.rank("u", ids(*HISTORY), ids(*turned), layout="causal")
    assert answer["usage"]["cached_tokens"] == 13, "the user's part is that of the other order"
    assert scores(answer) == pytest.approx(plain(server, turned), abs=1e-4)
    one = server.rank("u", ids(*HISTORY), ids(*ROWS), layout="causal")
    if server.method == "labelled":  # labels need candidates that follow each other
        assert scores(server.rank("u", ids(*HISTORY), ids(*ROWS))) == scores(one)
    changed = 1e-5 if server.method == "list_generation" else 1e-3
    assert scores(one) != pytest.approx(scores(answer), abs=changed)
    first = server.rank("u", ids(*HISTORY), ids(*ROWS), layout="user_prefix")
    assert first["usage"]["cached_tokens"] == 13, "the user's part is the same in both layouts"
    assert scores(first) != pytest.approx(scores(one), abs=1e-3)


def test_a_text_beyond_the_models_positions_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = make_config(
        tmp_path_factory.mktemp("model"), "rank.item=<sid><sid><sid>{sid}", "rank.tokens=128"
    )
    server = Served(config, ["rank"])
    try:
        body = {"history": ids(*HISTORY), "candidates": ids(*range(14, 28))}
        assert server.call("/v1/rank", body).status == 200
        refused = server.call("/v1/rank", body | {"layout": "causal"})
        assert (refused.status, refused.error["field"]) == (422, "layout")
        assert (
            "as causal the prompt needs 70 positions; the model was made for 64" in refused.error["message"]
        )
    finally:
        server.stop()


def test_letters_that_are_written_are_counted_in_the_order_that_is_asked_for(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In an overlaid order all candidates stand at the same positions, which are those of the longest item there is."""
    settings = ("rank.method=list_generation", "rank.letters=<a_{n}>", "rank.tokens=128")
    for item, count, answers in (
        ("<sid><sid><sid>{sid}", 14, {"user_prefix": 200, "item_prefix": 200, "causal": 422}),
        ("{sid}", 14, {"user_prefix": 422, "item_prefix": 422, "causal": 200}),
    ):
        span = 4 if item != "{sid}" else 40
        server = Served(
            make_config(
                tmp_path_factory.mktemp("model"), *settings, f"rank.item={item}", f"rank.item_span={span}"
            ),
            ["rank"],
        )
        try:
            body = {"history": ids(*HISTORY), "candidates": ids(*range(14, 14 + count))}
            found = {layout: server.call("/v1/rank", body | {"layout": layout}) for layout in answers}
            assert {layout: answer.status for layout, answer in found.items()} == answers
        finally:
            server.stop()
