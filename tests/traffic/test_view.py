# SPDX-License-Identifier: Apache-2.0
"""What `jgr top` makes of two looks: figures worked out by hand, of a fleet and of one server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from jgr.fields import UserError
from jgr.serving.api import ModelList
from jgr.serving.fleet_api import ReplicaInfo, Rollout, ServedVersion
from jgr.traffic import view_file
from jgr.traffic.view import Counts, Look, View, events, lines, look, quantile, view


def series(
    replica: str, answered: int, refused: int, device_s: float, cached: int, *, model: str = "m"
) -> str:
    labels = f'replica="{replica}",model="{model}"'
    fast = answered // 2
    return f"""\
# TYPE jgr_stage_seconds histogram
jgr_stage_seconds_bucket{{{labels},kind="rank",stage="total",le="0.01"}} {fast}
jgr_stage_seconds_bucket{{{labels},kind="rank",stage="total",le="0.02"}} {answered}
jgr_stage_seconds_bucket{{{labels},kind="rank",stage="total",le="+Inf"}} {answered}
jgr_stage_seconds_count{{{labels},kind="rank",stage="total"}} {answered}
jgr_stage_seconds_sum{{{labels},kind="rank",stage="total"}} 1.0
jgr_stage_seconds_bucket{{{labels},kind="rank",stage="queue",le="+Inf"}} 999
jgr_stage_seconds_count{{{labels},kind="rank",stage="queue"}} 999
jgr_stage_seconds_sum{{{labels},kind="rank",stage="queue"}} 1.0
# TYPE jgr_rejected counter
jgr_rejected_total{{{labels},reason="too_late"}} {refused}
jgr_rejected_total{{{labels},reason="queue_full"}} {refused}
# TYPE jgr_device_seconds counter
jgr_device_seconds_total{{{labels}}} {device_s}
# TYPE jgr_prompt_tokens counter
jgr_prompt_tokens_total{{{labels},source="cached"}} {cached}
jgr_prompt_tokens_total{{{labels},source="computed"}} 100
# TYPE jgr_cache_events counter
jgr_cache_events_total{{{labels},event="user_evicted"}} {answered}
jgr_cache_events_total{{{labels},event="user_stale"}} 77
# TYPE jgr_queue_depth gauge
jgr_queue_depth{{{labels}}} 3
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes{{{labels}}} 2097152
"""


def fleet(*names: str, version: str = "m@1") -> ModelList:
    served = [ServedVersion(id="m", version=version, catalog_version="c", state="ready", reload="never")]
    return ModelList(
        data=[],
        replicas=[
            ReplicaInfo(name=name, node=f"node-{name}", state="ready", models=served) for name in names
        ],
    )


def two() -> View:
    """Ten seconds of two replicas: the first answers 20 and refuses 2, the second answers nothing."""
    before = look(series("a", 100, 4, 1.0, 50) + series("b", 10, 0, 2.0, 0), fleet("a", "b"), 100.0, "")
    after = look(series("a", 120, 5, 6.0, 150) + series("b", 10, 0, 2.0, 0), fleet("a", "b"), 110.0, "")
    return view(before, after, 1e9)


def test_a_view_is_the_difference_of_two_looks_by_replica() -> None:
    a, b = two().replicas
    assert (a.replica, a.node, a.state, a.versions) == ("a", "node-a", "ready", ("m@1",))
    assert (a.goodput_per_s, a.refused_per_s, a.requests_per_s) == pytest.approx((2.0, 0.2, 2.2))
    assert (a.busy, a.cached, a.evicted_per_s) == pytest.approx((0.5, 1.0, 2.0))
    assert (a.queue, a.memory_bytes) == (3, 2 << 20)
    # Of 20 answers 10 took up to 10 ms, 10 more up to 20: the middle is 10 ms, and P99 nine tenths and more beyond.
    assert (a.p50_ms, a.p99_ms) == pytest.approx((10.0, 19.8))
    assert (b.goodput_per_s, b.busy, b.cached, b.p50_ms, b.p99_ms) == (0.0, 0.0, None, None, None)


def test_the_line_of_all_replicas_is_their_sum() -> None:
    total = two().total
    assert (total.replica, total.node, total.queue, total.memory_bytes) == ("all", "2 nodes", 6, 4 << 20)
    assert (total.goodput_per_s, total.busy, total.p99_ms) == pytest.approx((2.0, 0.5, 19.8))


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["starting", "starting"], "starting"),
        (["starting", "ready"], "ready"),
        (["starting", "failed"], "failed"),
        ([], "failed"),
    ],
)
def test_the_state_of_all_replicas_is_ready_where_one_is_and_else_what_all_are(
    states: list[str], told: str
) -> None:
    found = Look(0.0, {str(at): Counts(state=state) for at, state in enumerate(states)})
    assert view(found, found, 0.0).total.state == told


def test_series_of_several_models_are_added() -> None:
    text = series("a", 1, 0, 0.0, 0) + series("a", 4, 0, 0.0, 0, model="n")
    assert look(text, fleet("a"), 0.0, "").replicas["a"].sums["answered"] == 5


def test_what_began_anew_counts_from_there_and_a_new_replica_has_no_rates() -> None:
    before = look(series("a", 100, 0, 9.0, 0), fleet("a"), 0.0, "")
    after = look(series("a", 8, 0, 1.0, 0) + series("b", 500, 0, 9.0, 0), fleet("a", "b"), 2.0, "")
    a, b = view(before, after, 0.0).replicas
    assert (a.goodput_per_s, a.busy) == pytest.approx((4.0, 0.5))
    assert a.p99_ms == pytest.approx(19.8)
    assert (b.goodput_per_s, b.requests_per_s, b.queue) == (0.0, 0.0, 3)


def test_a_replica_whose_metrics_came_too_late_for_a_look_has_no_rates_after_it() -> None:
    late = look("", fleet("a"), 0.0, "")
    after = look(series("a", 500, 3, 9.0, 0), fleet("a"), 1.0, "")
    (a,) = view(late, after, 0.0).replicas
    assert (a.goodput_per_s, a.requests_per_s, a.busy, a.p99_ms, a.queue) == (0.0, 0.0, 0.0, None, 3)


def test_a_server_that_is_no_fleet_is_one_line() -> None:
    plain = series("", 10, 0, 1.0, 0).replace('replica="",', "")
    found = look(plain, ModelList(data=[]), 0.0, "host:1")
    assert found.replicas.keys() == {"host:1"}
    shown = view(found, found, 0.0)
    assert [line.split()[0] for line in lines(shown)] == ["replica", "host:1"]
    assert [line.split()[0] for line in lines(two())] == ["replica", "a", "b", "all"]


def test_the_last_change_of_a_fleet_stands_below_its_table() -> None:
    def told(rollout: Rollout | None) -> list[str]:
        models = fleet("a", "b")
        models.rollout = rollout
        found = look("", models, 0.0, "")
        return lines(view(found, found, 0.0))[4:]

    path = "/v1/models/m/reload"
    assert told(Rollout(state="running", path=path, of=2, done=("b",))) == [
        "",
        f"last change: {path}: running, 1 of 2 replicas",
    ]
    failed = Rollout(state="failed", path=path, of=2, done=("b",), replica="a", error="bad", back=("b",))
    assert told(failed)[1] == f"last change: {path}: failed, 1 of 2 replicas; 1 went back; at a: bad"
    assert told(None)[1] == "last change: not known, the coordinator does not answer"
    assert told(Rollout()) == []
    kept = msgspec.json.decode(
        view_file.line(view(Look(0.0, {}, failed), Look(0.0, {}, failed), 0.0)), type=View
    )
    assert kept.rollout == failed
    assert b"rollout" not in view_file.line(two()), "one server says nothing of it"


def test_what_a_fleet_lacks_and_turns_away_stands_below_its_table() -> None:
    """Two fronts refused 30 and 12 requests in ten seconds, which no replica has seen; one of them began anew."""

    def at(at_s: float, first: int, second: int) -> Look:
        models = fleet("a", "b")
        models.of = 3
        fronts = (
            f'jgr_fleet_held_off_total{{front="1"}} {first}\njgr_fleet_refused_total{{front="1"}} 7\n'
            f'jgr_fleet_refused_total{{front="2"}} {second}\n'
        )
        return look(fronts, models, at_s, "")

    shown = view(at(0.0, 100, 500), at(10.0, 130, 12), 0.0)
    assert shown.turned_away_per_s == 4.2
    assert lines(shown)[4:] == [
        "",
        "2 of 3 replicas are ready",
        "proxies and fronts refuse 4.2 requests a second more",
    ]
    silent = look("", fleet("a", "b"), 0.0, "")
    assert view(silent, at(10.0, 130, 12), 0.0).turned_away_per_s == 0.0, "nobody knows since when"
    whole = view(at(10.0, 130, 12), at(11.0, 130, 12), 0.0)
    whole = msgspec.structs.replace(whole, of=2)
    assert len(lines(whole)) == 4, "all is as it should be"


def test_quantiles_are_those_of_prometheus() -> None:
    buckets = {0.1: 0.0, 0.5: 5.0, 1.0: 10.0, float("inf"): 12.0}
    assert quantile(buckets, 0.25) == pytest.approx(100 + 400 * 3 / 5)
    assert quantile(buckets, 0.99) == 1000.0, "beyond the last bound its value is not known"
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None


def run() -> list[View]:
    """Three views: a replica serves another version, then one is lost and another begins."""

    def at(time: float, *names: str, version: str = "m@1") -> View:
        found = look("", fleet(*names, version=version), time, "")
        return view(found, found, time)

    return [at(1, "a", "b"), at(2, "a", "b", version="m@2"), at(3, "a", "c", version="m@2")]


def test_reloads_and_losses_are_told_by_what_changed() -> None:
    assert events(run()) == [(2, "changed", "a"), (2, "changed", "b"), (3, "begun", "c"), (3, "lost", "b")]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(map(view_file.line, [two(), *run()])) + view_file.line(two())[:40])
    assert view_file.read(path) == [two(), *run()], "the last line was cut off"
    path.write_bytes(view_file.line(two()) + b"{}\n")
    with pytest.raises(UserError, match=r"run\.jsonl, line 2: .*time"):
        view_file.read(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="holds no views"):
        view_file.read(path)


def test_the_picture_draws_every_replica_and_what_happened(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    view_file.check_picture(picture)
    view_file.draw([two(), *run()], picture)
    text = picture.read_text()
    for word in ("P99, ms", "replica lost", "replica begun", "replica changed", "in time", "seconds"):
        assert f"<!-- {word} -->" in text, word
    for replica in "abc":
        assert f"<!-- {replica} -->" in text
    with pytest.raises(UserError, match="--picture must name a file that ends in"):
        view_file.check_picture(tmp_path / "run.pdf")


def test_a_replica_that_answers_nothing_holds_nothing() -> None:
    assert look("", fleet("a"), 0.0, "").replicas == {
        "a": Counts(node="node-a", state="ready", versions=("m@1",))
    }
