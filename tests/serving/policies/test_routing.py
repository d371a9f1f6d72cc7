# SPDX-License-Identifier: Apache-2.0
"""A fleet's router by hand: each term, each rule, and what reports that are stale or missing do to it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from jgr.serving.policies import routing, routing_terms
from jgr.serving.policies.bookings import LOST_NS
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import BOUND, REPORTED_NS, SILENT_NS, Ask, Report, Router
from jgr.serving.policies.routing_terms import (
    RULES,
    Affinity,
    Late,
    Load,
    Matched,
    Residency,
    Reuse,
    Rule,
    Running,
    Share,
    View,
)

BITS = 12
SECOND = 1_000_000_000
NODES = ("a", "b", "c")
ASK = Ask("1", "user:1", 1000, ("item:1", "item:2"), 250, 500)
"""Half of it the user's, a fourth of it the items', of 2000 tokens."""
VIEW = View(
    user=np.array([1000.0, 0.0, 0.0]),
    reused=np.array([1000.0, 500.0, 0.0]),
    matched=np.array([0.5, 1.0, 0.0]),
    load=np.array([4000.0, 2000.0, 0.0]),
    running=np.array([1.0, 2.0, 0.0]),
    recent=np.array([600.0, 0.0, 300.0]),
    pace=np.array([1.0, 1.0, 1.0]),
    ns=np.array([10.0, 10.0, 0.0]),
    last=2,
    expected=0.0,
    tokens=2000.0,
    left_ns=math.inf,
)


def router(rule: Rule = "joint", nodes: tuple[str, ...] = NODES, name: str = "r") -> Router:
    made = Router(name, rule, BITS)
    made.become(nodes)
    return made


def report(
    users: tuple[str, ...] = (), items: tuple[str, ...] = (), ns: float = 0.0, **sent: float
) -> Report:
    return Report(digest(users, BITS), digest(items, BITS), ns, sent)


@pytest.mark.parametrize(
    ("term", "score"),
    [
        (Reuse(), [0.5, 0.25, 0]),  # the user's entry at a, the items' at b
        (Reuse(weight=3), [1.5, 0.75, 0]),
        (Load(1), [-0.5, 0, 0.5]),  # 6000, 4000 and 2000 tokens with this request
        (Load(0.5), [-0.25, 0, 0.25]),
        (Share(1), [-3 / 43, 3 / 43, 0]),  # 600, 0 and 300 tokens, and 4000 besides
        (Running(), [0, -0.5, 0.5]),  # 2, 3 and 1 requests with this one
        (Affinity(0.05, 0.5), [0, 0, 0.05]),
        (Matched(2, 0), [1, 2, 0]),  # beta = 0: where the candidates are
        (Matched(0, 1), [-0.5, 0, 0.5]),  # alpha = 0: where the least is in flight
        (Matched(1, 0.5), [0.25, 1, 0.25]),
        # The work of 40, 20 and no us; a node has had enough of it after 30 us. More tokens in flight lose a tie.
        (Matched(1, 0.5, slo_ns=30_000), [0.5 - 1e-6, 1 + 0.5 / 3 - 0.5e-6, 0.5]),
        (Late(), [0, 0, 0]),
    ],
)
def test_each_term(term: routing_terms.Term, score: list[float]) -> None:
    np.testing.assert_allclose(term(VIEW), score, atol=1e-12)


def test_terms_of_slow_nodes_late_ones_and_of_an_idle_fleet() -> None:
    slow = VIEW._replace(load=np.zeros(3), pace=np.array([1.0, 1.0, 4.0]))
    np.testing.assert_allclose(Load(1)(slow), [0.5, 0.5, -1])  # 2000, 2000 and 8000 tokens' time
    # Nodes a and b end it after 5000 and 3500 tokens of 10 ns; of c nothing is known.
    assert (Late(7)(VIEW._replace(left_ns=40_000)) == [-7, 0, 0]).all()
    assert (Late(7)(VIEW._replace(left_ns=10_000)) == [-7, -7, 0]).all()
    assert (Share(1)(VIEW._replace(recent=np.zeros(3))) == 0).all()


def test_a_user_is_believed_to_be_where_it_was_sent_until_a_report_must_have_told() -> None:
    affinity = Affinity(0.05, 0.5)
    assert (affinity(VIEW._replace(last=None)) == 0).all()
    np.testing.assert_allclose(affinity(VIEW._replace(expected=1000.0)), [0, 0, 0.05 + 0.25])
    np.testing.assert_allclose(affinity(VIEW._replace(expected=1000.0, last=1)), [0, 0.05 + 0.125, 0])
    np.testing.assert_allclose(affinity(VIEW._replace(expected=1000.0, last=0)), [0.05, 0, 0])
    of = router()
    assert of.view(ASK).expected == 0
    of.sent(ASK, "b", 5)
    for now_ns, expected in ((5, 1000), (5 + REPORTED_NS, 1000), (6 + REPORTED_NS, 0)):
        of.rank(replace(ASK, user=""), now_ns)
        of.heard("b", report())
        assert (of.view(ASK).last, of.view(ASK).expected) == (1, expected)
    of.sent(ASK, "b", 6 + REPORTED_NS)
    assert of.view(ASK).expected == 1000


def test_candidates_go_where_they_are_until_that_node_is_busier_than_they_are_worth() -> None:
    ask = Ask("1", "", 0, ("item:1", "item:2", "item:3"), 100, 0)
    for rule, most in (("matched", 2), ("rcllm", 3)):
        of = Router("r", rule, BITS, load=1)  # type: ignore[arg-type]
        of.become(NODES)
        of.heard("b", report(items=("item:1", "item:2", "item:3"), ns=1e6))
        of.heard("a", report(items=("item:1",), ns=1e6))
        of.heard("c", report(ns=1e6))
        # 300 tokens take .3 s; a third of a second's work is worth a third of the candidates.
        went = [of.rank(replace(ask, id=str(at)), 0)[0] for at in range(1)]
        assert went == ["b"]
        view = of.view(ask)
        assert view.matched.tolist() == pytest.approx([1 / 3, 1, 0])
        assert view.reused.tolist() == [100, 300, 0]
        for at in range(most):
            of.sent(Ask(f"other {at}", "", 0, (), 0, 400), "b", 0)
        assert of.rank(ask, 0)[0] == "a", "as much is to be done at b as the candidates save"
    only = Router("r", "matched", BITS, load=0)
    only.become(NODES)
    only.heard("b", report(items=("item:2",)))
    for at in range(20):
        only.sent(Ask(str(at), "", 0, (), 0, 5000), "b", 0)
    assert only.rank(ask, 0)[0] == "b", "without a weight of the load all of a community goes where it is"


@pytest.mark.parametrize("ns", [0.0, 1e9])
def test_of_nodes_that_are_full_or_of_unknown_pace_the_one_with_the_fewest_tokens_is_taken(ns: float) -> None:
    ask = Ask("1", "", 0, ("item:1",), 100, 0)
    of = router("rcllm")
    for name, tokens in (("a", 300), ("b", 200), ("c", 250)):
        of.heard(name, report(items=("item:1",), ns=ns))
        of.sent(Ask(name, "", 0, (), 0, tokens), name, 0)
    for at in range(20):
        assert of.rank(replace(ask, id=str(at)), 0) == ["b", "c", "a"]


def test_a_node_that_reuses_user_and_items_of_one_prompt_saves_both() -> None:
    of = router()
    of.heard("a", report(users=("user:1",), items=("item:1",)))
    assert of.view(ASK).reused.tolist() == [1000, 0, 0]
    assert of.view(replace(ASK, both=True)).reused.tolist() == [1250, 0, 0]


def test_a_view_is_what_the_nodes_reported_and_what_was_sent() -> None:
    of = router()
    of.heard("a", report(users=("user:1",), items=("item:1",), ns=10, r=70, other=30, third=3))
    of.heard("b", report(items=("item:1", "item:2", "item:3")))
    assert of.sent(ASK, "a", 0) == 1000
    assert of.sent(replace(ASK, id="2", user="user:2"), "b", 0) == 1500
    view = of.view(ASK)
    assert of.nodes == NODES
    assert view.user.tolist() == [1000, 0, 0] and view.reused.tolist() == [1000, 500, 0]
    # What this router sent is known from its bookings alone. Others have sent 11 in the mean, of which 33 to a.
    assert view.load.tolist() == [1000 + 16.5, 1500 + 8.25, 8.25]
    assert view.running.tolist() == [1, 1, 0]
    assert view.recent.tolist() == pytest.approx([1000 * (1 - 1 / 96), 1500, 0])
    assert view.ns.tolist() == [10, 0, 0] and view.pace.tolist() == [1, 1, 1]
    assert (view.last, view.expected, view.tokens, view.left_ns) == (0, 1000, 2000, math.inf)
    assert view.computed.tolist() == [1000, 1500, 2000]
    of.check()


def test_where_a_request_goes_by_each_rule() -> None:
    first: dict[Rule, str] = {}
    for rule in ("joint", "hit", "load", "least"):
        of = router(rule)
        of.heard("a", report(users=("user:1",)))
        of.heard("b", report(items=("item:1", "item:2")))
        of.sent(Ask("x", "", 0, (), 0, 9000), "a", 0)
        for number in range(3):
            of.sent(Ask(f"y{number}", "", 0, (), 0, 500), "b", 0)
        of.sent(Ask("z", "", 0, (), 0, 4000), "c", 0)
        of.sent(Ask("w", "", 0, (), 0, 4000), "c", 0)
        first[rule] = of.rank(ASK, 0)[0]
    # a holds the user but has 9000 tokens to do, b the items and 1500 tokens in three requests, c nothing and 8000.
    assert first == {"joint": "b", "hit": "a", "load": "b", "least": "a"}


def test_a_node_with_the_user_wins_over_one_with_the_rows_until_its_load_costs_more() -> None:
    """HLEM-13, HLEM-18: 2000 tokens of 10 ns for the user, 4 us for the rows, a node is full after 36 us."""
    term = Residency(affinity=0.05, slo_ns=36_000)
    view = VIEW._replace(
        load=np.zeros(3), ns=np.full(3, 10.0), rows=np.array([0.0, 1.0, 0.5]), rows_ns=4_000.0
    )
    assert term.weights(view) == pytest.approx((20 / 60, 4 / 60, 36 / 60))
    np.testing.assert_allclose(term(view), [56 / 60, 40 / 60, 38 / 60 + 0.05])
    # The user saves 16 us more than the rows: as much as 1600 tokens in flight.
    for tokens, best in ((1500, 0), (1700, 1)):
        assert term(view._replace(load=np.array([tokens, 0, 0]), last=None)).argmax() == best
    full = view._replace(load=np.array([3200.0, 3300.0, 3100.0]), last=None)
    np.testing.assert_allclose(
        term(full), 1 - full.load * 10 / 36_000
    )  # all have more than .85: the least loaded
    unknown = view._replace(ns=np.zeros(3), rows=None)
    assert term.weights(unknown) == pytest.approx((12.5 / 14.5, 1 / 14.5, 1 / 14.5))
    assert term(unknown).argmax() == 0


def test_rows_are_known_from_reports() -> None:
    of = router("hlem")
    ask = replace(ASK, user="", shards=("shard 1", "shard 2", "shard 3", "shard 4"))
    assert of.view(ASK).rows is None
    of.heard("b", Report(shards=digest(("shard 1", "shard 3", "shard 4"), BITS), rows_ns=5.0))
    view = of.view(ask)
    assert view.rows is not None and view.rows.tolist() == [0, 0.75, 0] and view.rows_ns == 5.0
    assert of.rank(ask, 0)[0] == "b"
    of.become(("b", "c"))
    of.check()
    assert of.rank(ask, 0)[0] == "b"
    with pytest.raises(ValueError, match="rows_ns: must be finite"):
        Report(rows_ns=-1.0)


def test_a_full_node_loses_what_its_cache_is_worth_and_no_other_does() -> None:
    of = router()
    for name in ("a", "b"):
        of.heard(name, report(users=("user:1",)))
    for number in range(8):
        of.sent(Ask(str(number), "", 0, (), 0, 2000), "a", 0)
    assert of.rank(ASK, 0) == ["b", "c", "a"]
    for number in range(8):
        of.ended(str(number))
    assert set(of.rank(ASK, 0)[:2]) == {"a", "b"}


def test_a_node_that_would_be_late_comes_last() -> None:
    of = router()
    of.heard("a", report(users=("user:1",), ns=1000))
    of.heard("b", report(ns=1000))
    assert of.rank(replace(ASK, left_ns=2_000_001), 0)[0] == "a"
    of.sent(Ask("x", "", 0, (), 0, 10_000), "a", 0)  # 11 ms with what the request needs there
    assert of.rank(replace(ASK, left_ns=11_000_000), 0)[-1] != "a" or of.rank(ASK, 0)[-1] == "a"
    assert of.rank(replace(ASK, left_ns=10_999_999), 0)[-1] == "a"
    assert of.rank(replace(ASK, left_ns=1), 0)[0] == "c", "of which nothing is known"
    assert router("load").rank(replace(ASK, left_ns=1), 0), "no other rule knows deadlines"


@pytest.mark.parametrize(
    ("ns", "pace"), [((10, 10, 100), [1, 1, 10]), ((10, 12, 14), [1, 1, 1]), ((0, 8, 8), [1] * 3)]
)
def test_a_node_is_slow_beside_the_median(ns: tuple[float, ...], pace: list[float]) -> None:
    of = router()
    for name, each in zip(NODES, ns, strict=True):
        of.heard(name, report(ns=each))
    assert of.view(ASK).pace.tolist() == pace


def test_a_node_ten_times_slower_gets_a_tenth_of_the_work_in_flight() -> None:
    of = router("load")
    for name, ns in zip(NODES, (10, 10, 100), strict=True):
        of.heard(name, report(ns=ns))
    for number in range(210):
        ask = Ask(str(number), "", 0, (), 0, 100)
        of.sent(ask, of.rank(ask, 0)[0], 0)
    load = of.view(ASK).load
    assert load.tolist() == pytest.approx([10_000, 10_000, 1000], abs=200)


def test_what_a_node_is_told_to_expect_is_what_is_booked_there_until_it_ends() -> None:
    """A user of 900 tokens, who is kept at b, two items of 50, of which a holds one, and 10 tokens besides."""
    ask = Ask("1", "u", 900, ("x", "y"), 50, 10)
    for rule in ("joint", "round_robin"):  # with a score and without
        of = router(rule, ("a", "b", "c"))  # type: ignore[arg-type]
        of.heard("a", report(items=("x",)))
        of.heard("b", report(users=("u",)))
        ranked = of.rank(ask, 0)
        assert of.expected(ask, [*ranked, "gone"]) == {"a": 960, "b": 110, "c": 1010}
        assert (of.booked("1"), of.in_flight("b")) == (None, 0)
        of.heard("b", report())
        assert of.sent(ask, "b", 0, 110) == 110, "as it was told, though the user is gone there"
        assert (of.booked("1"), of.in_flight("b"), of.in_flight("a")) == ("b", 110, 0)
        assert of.sent(ask, "c", 0) == 1010
        assert (of.booked("1"), of.in_flight("b"), of.in_flight("c")) == ("c", 0, 1010)
        of.ended("1", "b")
        assert of.booked("1") == "c", "an end elsewhere"
        of.ended("1", "c")
        assert (of.booked("1"), of.in_flight("c"), of.in_flight("gone")) == (None, 0, 0)


def test_ones_own_bookings_spread_requests_whatever_the_reports_say() -> None:
    """Every node claims to be idle for ever, and one claims to hold everybody."""
    of = router(nodes=tuple("abcdefgh"))
    users = tuple(f"user:{number}" for number in range(64))
    for number, user in enumerate(users):
        of.heard("a", report(users=users))
        ask = Ask(str(number), user, 900, (), 0, 100)
        of.sent(ask, of.rank(ask, number)[0], number)
    view = of.view(ASK)
    assert view.running.sum() == 64 and view.running.min() >= 1
    assert view.load.max() <= 2.5 * view.load.mean(), "some 50 requests that it should not have to compute"


def test_what_other_routers_sent_is_avoided_until_reports_cease() -> None:
    of = router("load")
    of.rank(ASK, 0)
    for name, others in zip(NODES, (500.0, 0.0, 900.0), strict=True):
        of.heard(name, report(other=others))
    assert of.rank(ASK, SECOND) == ["b", "a", "c"]
    of.heard("c", report(r=900.0))
    assert of.rank(ASK, 2 * SECOND)[-1] == "a"
    assert of.view(ASK).load.tolist() == pytest.approx([250, 125, 125])
    of.rank(ASK, SILENT_NS - 1)
    assert of.view(ASK).load.tolist() == pytest.approx([250, 125, 125])
    of.rank(ASK, SILENT_NS + SECOND)
    assert of.view(ASK).load.tolist() == [0, 0, 0]


def test_a_report_before_the_first_request_is_no_older_than_it() -> None:
    of = router("load")
    of.heard("a", report(other=500.0))
    assert of.rank(ASK, 10**18)[-1] == "a"
    of.rank(ASK, 10**18 + SILENT_NS)
    assert of.view(ASK).load.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rule", RULES)
def test_nodes_that_refused_a_request_come_last(rule: Rule) -> None:
    of = router(rule)
    of.heard("a", report(users=("user:1",)))
    for tried in ((), ("a",), ("b", "a"), ("gone", "c"), NODES):
        ranked = of.rank(replace(ASK, tried=tried), 0)
        here = set(NODES) & set(tried)
        assert sorted(ranked) == sorted(NODES)
        assert set(ranked[len(NODES) - len(here) :]) == here


@pytest.mark.parametrize("rule", RULES)
def test_a_router_without_nodes_and_nodes_without_a_report(rule: Rule) -> None:
    of = Router("r", rule, BITS)
    assert of.rank(ASK, 0) == [] and of.sent(ASK, "a", 0) == 0 and of.nodes == ()
    of.become(NODES)
    assert sorted(of.rank(Ask("1", "", 0, (), 0, 0), 0)) == sorted(NODES)
    of.become(())
    assert of.rank(ASK, 0) == []
    of.check()


def test_a_rank_that_is_sent_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of, views = router(), []
    view = of.view
    monkeypatch.setattr(of, "view", lambda ask: views.append(ask.id) or view(ask))
    of.sent(ASK, of.rank(ASK, 0)[0], 0)
    assert views == ["1"]
    of.sent(ASK, "a", 0)  # again, without a rank
    assert views == ["1", "1"]
    for number in range(routing.UNSENT + 1):
        of.rank(replace(ASK, id=f"x{number}"), 0)
    of.check()
    views.clear()
    of.sent(replace(ASK, id="x0"), "a", 0)
    of.sent(replace(ASK, id="x1"), "a", 0)
    assert views == ["x0"], "the oldest is forgotten"


def test_lost_completions_are_forgotten() -> None:
    of = router()
    of.sent(ASK, "a", 5)
    of.rank(ASK, LOST_NS + 4)
    assert of.view(ASK).load.tolist() == [2000, 0, 0]
    of.rank(ASK, LOST_NS + 5)
    assert of.view(ASK).load.tolist() == [0, 0, 0]
    of.ended(ASK.id, "a")
    of.check()


def test_nothing_is_remembered_of_a_node_that_left() -> None:
    known, fresh = router(), router(nodes=("b", "c", "d"))
    known.heard("a", report(("user:1",), ("item:1",), 5.0, other=7.0))
    known.sent(ASK, "a", 0)
    known.become(("b", "c"))
    known.become(("c", "d", "b"))
    for of in (known, fresh):
        of.heard("c", report(ns=9.0))
        of.check()
    ask = replace(ASK, id="2")
    seen = []
    for of in (known, fresh):
        view = of.view(ask)
        arrays = (view.user, view.reused, view.load, view.running, view.recent, view.pace, view.ns)
        seen.append({name: [array[slot] for array in arrays] for slot, name in enumerate(of.nodes)})
        assert view.last is None
    assert seen[0] == seen[1]
    known.ended(ASK.id, "a")
    known.heard("a", report(("user:1",)))
    known.become(("a", "b"))
    assert known.view(ask).user.tolist() == [0, 0], "a node of the same name is a new one"
    known.check()


def test_reports_that_cannot_be_change_nothing() -> None:
    of = router()
    good = report(("user:1",), ("item:1",), 5.0, other=7.0)
    of.heard("a", good)
    with pytest.raises(ValueError, match="512 bytes, got 3"):
        of.heard("a", replace(good, users=b"", items=b"abc", sent={}))
    assert of.view(ASK).user.tolist() == [1000, 0, 0] and of.view(ASK).load.tolist() == [3.5, 1.75, 1.75]
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="ns_per_token: must be finite"):
            Report(ns_per_token=bad)
        with pytest.raises(ValueError, match="other: must be finite"):
            Report(sent={"other": bad})


def test_round_robin_goes_round() -> None:
    of = router("round_robin")
    ranks = [of.rank(ASK, 0) for _ in range(6)]
    assert ranks[:3] == ranks[3:]
    for place in range(3):
        assert Counter(rank[place] for rank in ranks) == Counter(NODES * 2)


@pytest.mark.parametrize("rule", ["random", "joint", "load"])
def test_equal_nodes_have_equal_chances_at_every_place(rule: Rule) -> None:
    nodes = tuple(f"node-{number}" for number in range(10))
    of = router(rule, nodes)
    ranks = [of.rank(replace(ASK, id=str(number)), 0) for number in range(3000)]
    for place in (0, 1, 9):
        assert chisquare([Counter(rank[place] for rank in ranks)[name] for name in nodes]).pvalue > 1e-3
    pairs = Counter((rank[0], rank[1]) for rank in ranks)
    assert len(pairs) == 90, "who comes second does not hang on who comes first"
    assert chisquare(list(pairs.values())).pvalue > 1e-3


def test_two_routers_do_not_go_in_step() -> None:
    nodes = tuple(f"node-{number}" for number in range(10))
    for rule in ("random", "load", "round_robin"):
        one, two = (router(rule, nodes, name) for name in ("0", "1"))
        same = sum(one.rank(ASK, 0)[0] == two.rank(ASK, 0)[0] for _ in range(500))
        assert same < 100 if rule != "round_robin" else same == 0


def test_few_users_move_where_a_node_leaves() -> None:
    nodes = tuple(f"node-{number}" for number in range(10))
    of = router("hash", nodes)
    asks = [Ask(str(number), f"user:{number}", 1, (), 0, 1) for number in range(4000)]
    before = {ask.user: of.rank(ask, 0) for ask in asks}
    assert before == {ask.user: of.rank(ask, 0) for ask in asks}
    homes = Counter(rank[0] for rank in before.values())
    assert chisquare([homes[name] for name in nodes]).pvalue > 1e-3
    of.become(nodes[:4] + nodes[5:])
    for ask in asks:
        assert of.rank(ask, 0) == [name for name in before[ask.user] if name != "node-4"]
    of.become(nodes)
    assert before == {ask.user: of.rank(ask, 0) for ask in asks}


def test_the_hash_has_a_bound_that_no_node_exceeds() -> None:
    of = router("hash", tuple("abcdefgh"))
    counts: Counter[str] = Counter()
    for number in range(400):
        ask = Ask(str(number), f"user:{number % 3}", 1, (), 0, 1)  # three users, so three homes
        name = of.rank(ask, 0)[0]
        of.sent(ask, name, 0)
        counts[name] += 1
        assert counts[name] <= math.ceil(BOUND * (number + 1) / 8)
    assert len(counts) == 7
    for number in range(400):
        of.ended(str(number))
    assert len({of.rank(Ask(str(n), f"user:{n % 3}", 1, (), 0, 1), 0)[0] for n in range(60)}) <= 3


def test_users_that_came_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED_USERS", 2)
    of = router()
    for number in (1, 2, 1, 3):
        of.sent(Ask(str(number), f"user:{number}", 1, (), 0, 1), "b", 0)
    assert [of.view(replace(ASK, user=f"user:{n}")).last for n in (1, 2, 3)] == [1, None, 1]
    assert of.view(replace(ASK, user="")).last is None
    of.check()
