# SPDX-License-Identifier: Apache-2.0
"""`jgr bench serve` as a user meets it, against a live server."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from absl import flags

import jgr
from jgr.catalog.catalog import save_catalog
from jgr.cli import bench_serve
from jgr.config import UserError
from jgr.traffic.arrivals import parse_process
from tests.commands import run_here
from tests.serving.certificates import make_pems, tls
from tests.serving.fakes import CATALOG, LiveServer


def _bench(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_here("bench", *argv)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("server.api_key=k3y") as server:
        yield server


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    save_catalog(CATALOG, tmp_path / "catalog.jsonl")
    return f"catalog.path={tmp_path / 'catalog.jsonl'}"


def test_alone_it_lists_its_benchmarks() -> None:
    done = _bench()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jgr bench serve ")


@pytest.mark.parametrize(("kind", "more"), [("recommend", []), ("rank", ["--candidates=3"])])
def test_a_load_at_a_rate(server: LiveServer, catalog: str, kind: str, more: list[str]) -> None:
    shape = ["--rate=40", "--duration=0.5", "--arrivals=constant", f"--kind={kind}", *more]
    limits = ["--history_length=2", "--top_k=2", "--slo_ms=60000", "--api_key=k3y"]
    done = _bench("serve", f"--url={server.listener.url}", "--set", catalog, *shape, *limits)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    lines = [line for line in lines if not line.startswith(("warning", "waited"))]  # where there was no core
    report = json.loads(last)
    assert (report["sent"], report["answered"], report["failed"]) == (20, {"200": 20}, {})
    assert (report["in_time"], report["slo_ms"]) == (20, 60000.0)
    assert report["load"]["kind"] == kind
    assert [line.split()[0] for line in lines] == ["sent", "goodput", "latency", "lateness"]
    assert "20 requests" in lines[0]
    assert "20 answered 200" in lines[0]
    assert "100.0% of the requests" in lines[1]


def test_https_below_a_base_path_by_two_processes(catalog: str, tmp_path: Path) -> None:
    pems = make_pems(tmp_path)
    load = ["--rate=40", "--duration=0.5", "--arrivals=constant", "--history_length=2", "--top_k=2"]
    with LiveServer(*tls(pems), "server.base_path=/shop/jgr") as server:
        url = f"--url={server.listener.url}/shop/jgr"
        trust = f"--ca_file={pems['authority']}"
        done = _bench("serve", url, trust, "--processes=2", "--set", catalog, *load)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout.splitlines()[-1])["answered"] == {"200": 20}
        here = [f"--set={setting}" for setting in (*tls(pems), f"server.port={server.port}")]
        done = _bench("serve", *here, "--set", catalog, *load)  # the configuration's own address is https
        assert done.returncode == 2
        assert f"jgr: 127.0.0.1 port {server.port}: certificate verify failed: " in done.stderr
        assert "; --ca_file may name its authority" in done.stderr


def test_a_trace_and_the_configured_address(server: LiveServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    paths = ["/v1/recommend", "/v1/recommend", "/v1/nowhere"]
    bodies: list[object] = [{"history": ["a"], "top_k": 1}, {"history": []}, {}]
    lines = [
        {"at_ms": 5 * i, "path": path, "body": body}
        for i, (path, body) in enumerate(zip(paths, bodies, strict=True))
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = _bench("serve", f"--trace={trace}", f"--set=server.port={server.port}", "--set=server.api_key=k3y")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["answered"] == {"200": 1, "404": 1, "422": 1}
    assert report["errors"] == {"404": {"not_found": 1}, "422": {"invalid_request": 1}}
    assert report["load"] == {"trace": str(trace), "rate": None, "duration_s": None, "processes": 1}
    assert list(report["classes"]) == ["recommend", "nowhere"]
    assert "k3y" not in done.stdout


def test_a_model_folder_says_where_item_ids_come_from(server: LiveServer, tmp_path: Path) -> None:
    save_catalog(CATALOG, tmp_path / "catalog.jsonl")
    shape = ["--rate=40", "--duration=0.5", "--arrivals=constant", "--history_length=2", "--top_k=2"]
    done = _bench("serve", str(tmp_path), f"--url={server.listener.url}", "--api_key=k3y", *shape)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["answered"] == {"200": 20}


def test_where_all_came_too_late_it_says_what_to_change(server: LiveServer, catalog: str) -> None:
    shape = ["--rate=40", "--duration=0.2", "--history_length=2", "--top_k=2", "--deadline_ms=0.001"]
    done = _bench("serve", "--set", catalog, f"--url={server.listener.url}", "--api_key=k3y", *shape)
    assert json.loads(done.stdout.splitlines()[-1])["answered"].keys() <= {"429", "504"}
    assert done.returncode == 2
    assert "take a lower --rate, or a longer --deadline_ms" in done.stderr and "--timed" not in done.stderr


def test_where_all_are_refused_the_server_is_quoted(server: LiveServer, catalog: str) -> None:
    shape = ["--rate=40", "--duration=0.1", "--history_length=2", "--top_k=900"]
    done = _bench("serve", "--set", catalog, f"--url={server.listener.url}", "--api_key=k3y", *shape)
    assert done.returncode == 2
    words = "jgr: no request was answered 200; of the first one it says: top_k is 900; it can be at most beam_width"
    assert done.stderr.startswith(words), done.stderr


def test_a_server_that_only_ranks_is_asked_to_rank_with_times_where_it_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LiveServer() as server, jgr.Client(server.listener.url) as client:
        (info,) = client.models()
        scorer = msgspec.structs.replace(info, id="hstu", max_beam_width=0, timed=True)
        for models, given, kind, timed, model in (
            ([info], [], "recommend", False, None),
            ([info], ["--kind=rank"], "rank", False, None),
            ([scorer], [], "rank", True, None),
            ([scorer], ["--notimed"], "rank", False, None),
            ([scorer], ["--kind=recommend"], "recommend", False, None),
            ([info, scorer], [], "rank", True, "hstu"),
            ([info, scorer], [f"--model={info.id}"], "recommend", False, info.id),
            ([info, scorer], [f"--model={info.id}", "--kind=rank"], "rank", False, info.id),
            ([scorer, info], ["--kind=recommend"], "recommend", False, "hstu"),
        ):
            values = flags.FlagValues()
            flags.DEFINE_enum("kind", "recommend", ("recommend", "rank"), "", flag_values=values)
            flags.DEFINE_bool("timed", False, "", flag_values=values)
            for name in ("trace", "mix", "model"):
                flags.DEFINE_string(name, None, "", flag_values=values)
            values(["jgr bench", *given])
            monkeypatch.setattr(client, "models", lambda models=models: models)
            bench_serve.fit_to_models(values, client, "hstu")
            assert (values.kind, values.timed, values.model) == (kind, timed, model), given
        values.model = "other"
        with pytest.raises(UserError, match="--model: the server has no 'other'; it has "):
            bench_serve.fit_to_models(values, client, "hstu")


MIX = {
    "classes": [
        {"name": "home", "weight": 3, "history_length": "uniform:1:3", "top_k": 2, "beam_width": 5},
        {"name": "late", "history_length": 2, "top_k": 1, "deadline_ms": 1e-6},
        {"name": "feed", "kind": "rank", "history_length": 1, "candidates": "oneof:2:4", "top_k": 1},
    ]
}


def test_a_mix_over_a_log_by_two_processes(server: LiveServer, catalog: str, tmp_path: Path) -> None:
    mix, log = tmp_path / "mix.json", tmp_path / "log.jsonl"
    mix.write_text(json.dumps(MIX))
    log.write_text("".join(f'{{"timestamp": {1000 * (i // 2)}}}\n' for i in range(60)))
    load = [f"--mix={mix}", f"--arrivals_file={log}", "--rate=100", "--duration=0.5", "--processes=2"]
    limits = ["--slo_ms=60000", "--api_key=k3y", f"--url={server.listener.url}"]
    done = _bench("serve", "--set", catalog, *load, *limits)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    report = json.loads(last)
    assert (report["sent"], report["offered_per_s"], report["load"]["format"]) == (50, 100.0, "mooncake")
    assert report["classes"].keys() == {"home", "late", "feed"}
    assert report["kinds"].keys() == {"recommend", "rank"}
    for name in ("home", "feed"):
        part = report["classes"][name]
        assert part["answered"] == {"200": part["sent"]} and part["in_time"] == part["sent"]
    late = report["classes"]["late"]
    assert late["in_time"] == 0
    refusals = Counter(kind for of in late["errors"].values() for kind in of)
    assert refusals.keys() <= {"deadline_exceeded", "overloaded"} and late["answered"].keys() <= {
        "429",
        "504",
    }
    assert sum(part["sent"] for part in report["classes"].values()) == 50
    assert [line.split(":")[0] for line in lines if line.startswith("  ")] == [
        "  kind recommend", "  kind rank", "  class home", "  class late", "  class feed",
    ]  # fmt: skip


def _svg(picture: Path) -> str:
    text = picture.read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    return text


def test_a_sweep_of_rates_and_its_picture(server: LiveServer, catalog: str, tmp_path: Path) -> None:
    picture = tmp_path / "rates.svg"
    shape = ["--rates=20,60", "--duration=0.5", "--arrivals=constant", "--history_length=2", "--top_k=2"]
    limits = ["--slo_ms=60000", "--api_key=k3y", f"--url={server.listener.url}", f"--plot={picture}"]
    done = _bench("serve", "--set", catalog, *shape, *limits)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    points = json.loads(last)["points"]
    assert [(point["sent"], point["offered_per_s"], point["in_time"]) for point in points] == [
        (10, 20.0, 10),
        (30, 60.0, 30),
    ]
    assert [line.split()[0] for line in lines] == ["20.0/s", "60.0/s"]
    _svg(picture)


def test_a_rate_so_low_that_nothing_comes_to_warm_up_is_measured(server: LiveServer, catalog: str) -> None:
    def drawn(seed: int, number: int, seconds: float) -> int:
        return len(
            parse_process("poisson").times(np.random.default_rng((seed, number)), rate=2, duration_s=seconds)
        )

    # The warm-up is a second, and the first that is drawn.
    seed = next(seed for seed in itertools.count() if not drawn(seed, 0, 1.0) and drawn(seed, 1, 0.5))
    shape = ["--rates=2", "--duration=0.5", "--arrivals=poisson", f"--seed={seed}", "--history_length=2"]
    target = ["--top_k=2", "--api_key=k3y", f"--url={server.listener.url}", "--set", catalog]
    done = _bench("serve", *shape, *target)
    assert (done.returncode, done.stderr) == (0, "")
    (point,) = json.loads(done.stdout.splitlines()[-1])["points"]
    assert point["answered"] == {"200": drawn(seed, 1, 0.5)}


SEARCH = ("--history_length=2", "--top_k=2", "--find_capacity", "--share=.5", "--duration=0.2")


def test_the_capacity_of_a_server_that_answers_nothing_in_time_and_of_one_that_does(
    server: LiveServer, catalog: str, tmp_path: Path
) -> None:
    shape = [*SEARCH, "--rate=200"]
    target = ["--api_key=k3y", f"--url={server.listener.url}", "--set", catalog, "--max_probes=2"]
    done = _bench("serve", *shape, *target, "--slo_ms=0", f"--plot={tmp_path / 'a.png'}")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["capacity_per_s"], report["fails_at_per_s"]) == (None, 100.0)
    assert [(p["rate"], p["holds"], len(p["rounds"])) for p in report["probes"]] == [
        (200.0, False, 2),
        (100.0, False, 2),
    ]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # The number of requests is bounded: a high rate is sent for a shorter time, and does not end the search.
    done = _bench("serve", *shape, *target, "--slo_ms=60000", "--arrivals=constant", "--max_requests=50")
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["capacity_per_s"], report["fails_at_per_s"]) == (400.0, None)
    assert [[r["sent"] for r in p["rounds"]] for p in report["probes"]] == [[40], [50]]
    assert "capacity  at least 400/s" in done.stdout


def test_a_round_of_the_search_has_the_whole_period_of_the_arrivals(server: LiveServer, catalog: str) -> None:
    target = ["--api_key=k3y", f"--url={server.listener.url}", "--set", catalog, "--max_probes=1"]
    shape = [*SEARCH, "--rate=50", "--slo_ms=60000", "--arrivals=flash:2:0.5:10"]
    done = _bench("serve", *shape, *target)
    (probe,) = json.loads(done.stdout.splitlines()[-1])["probes"]
    # The crowd comes in the middle of two seconds: 75 requests without it, and 250 in it.
    assert [r["sent"] > 200 for r in probe["rounds"]] == [True]


def test_a_server_that_answers_nobody_ends_the_search_before_it_begins(
    server: LiveServer, catalog: str
) -> None:
    shape = [*SEARCH, "--rate=50"]
    done = _bench("serve", *shape, "--api_key=wrong", f"--url={server.listener.url}", "--set", catalog)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        "no request was answered 200: the server asks for a key that it knows; see --api_key" in done.stderr
    )


def test_a_log_that_is_too_short_to_show_a_share_is_an_error(
    server: LiveServer, catalog: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"timestamp": {i}}}\n' for i in range(20)))
    target = ["--api_key=k3y", f"--url={server.listener.url}", "--set", catalog, "--history_length=2"]
    done = _bench("serve", *target, f"--arrivals_file={log}", "--find_capacity", "--top_k=1")
    assert done.returncode == 2
    assert "20 requests cannot show a share of 0.99" in done.stderr


def test_a_run_that_is_too_long_is_refused(catalog: str) -> None:
    done = _bench("serve", "--set", catalog, "--history_length=1", "--rate=1000", "--duration=200")
    assert (done.returncode, done.stdout) == (2, "")
    assert "200000 requests" in done.stderr and "--max_requests is 100000" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srv"], ["no benchmark 'srv'", "there are: serve"]),
        (["serve", "/nowhere"], ["/nowhere"]),
        (["serve", "a", "b"], ["unexpected argument 'b'"]),
        (["serve", "a", "--config=b.py"], ["folder, a, or by --config"]),
        (["ops", "now"], ["unexpected argument 'now'"]),
        (["serve", "--url=http://10.0.0.1:1"], ["10.0.0.1 is not this machine", "--allow_remote"]),
        (["serve", "--url=ftp://localhost"], ["http://127.0.0.1:8000"]),
        (["serve", "--url=https://localhost", "--ca_file=/nowhere.pem"], ["ca_file: /nowhere.pem"]),
        (["serve"], ["--set catalog.path=", "--trace"]),
        (["serve", "--rate=nan"], ["--rate must be a finite number"]),
        (["serve", "--slo_ms=inf"], ["--slo_ms must be a finite number"]),
        (["serve", "--rate=0"], ["rate"]),
        (["serve", "--rates=10,0"], ["--rates must be numbers"]),
        (["serve", "--rates=10,many"], ["--rates must be numbers"]),
        (["serve", "--rates=10", "--rate=5"], ["--rates and --rate exclude each other"]),
        (["serve", "--rates=10", "--find_capacity"], ["--rates and --find_capacity exclude each other"]),
        (["serve", "--mix=m.json", "--kind=rank"], ["--mix and --kind exclude each other"]),
        (["serve", "--trace=t.jsonl", "--arrivals=poisson"], ["--trace and --arrivals exclude each other"]),
        (["serve", "--trace=t.jsonl", "--deadline_ms=5"], ["--trace and --deadline_ms exclude each other"]),
        (["serve", "--arrivals=gamma"], ["gamma:CV"]),
        (["serve", "--mix=/nowhere.json"], ["/nowhere.json: cannot be read"]),
        (["serve", "--plot=a.png"], ["--plot draws several rates", "--find_capacity"]),
        (["serve", "--rates=10,20", "--plot=a.pdf"], ["--plot must name a file that ends in .png or .svg"]),
        (["serve", "--rates=10,20", "--plot=/nowhere/a.png"], ["there is no folder /nowhere"]),
        (["serve", "--trace=/nowhere.jsonl"], ["/nowhere.jsonl: cannot be read"]),
        (["serve", "--trace=/dev/null"], ["not a regular file"]),
    ],
)
def test_mistakes_are_one_line(argv: list[str], words: list[str]) -> None:
    done = _bench(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
