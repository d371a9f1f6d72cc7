# SPDX-License-Identifier: Apache-2.0
"""What people do with jgr, from the wheel in an environment of its own, by the commands that they would type.

A researcher comes with a log of ratings and leaves with a served model; a serving engineer comes with a model of
somebody else's, and wants it behind https with keys; a systems researcher takes mechanisms away and counts. `training`
has jgr[train], `serving` jgr alone.
"""

from __future__ import annotations

import importlib
import json
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http

import jgr
from jgr.config import load_config, named, to_json
from jgr.evaluation.report import BASELINES
from tests.cli.test_convert import NAMES, published
from tests.data.preparation.own_files import log, write
from tests.installed import PATIENCE_S, ROOT, Environment, asked
from tests.serving.certificates import make_pems
from tools.dashboards import BOARDS, families
from tools.packages import closure, own_mb

pytestmark = pytest.mark.slow
PAGES = {"/docs": b"swagger", "/ui": b'<button role="tab" id="tab-live"'}
"""Pages that a browser opens, and what stands in each."""
TINY = (
    "train.steps=4", "train.batch=8", "train.warmup_steps=1", "train.hidden=16", "train.layers=1", "train.heads=2",
    "train.kv_heads=2", "train.head_dim=8", "train.mlp=32", "profiles.batch=1", "profiles.tokens=64",
    "profiles.widths=8", "profiles.candidates=12", "beam.width=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def serving(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("serving"), closure(*asked(wheel)), wheel)


@pytest.fixture(scope="module")
def training(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    packages = closure(*asked(wheel), *asked(wheel, "train"))
    return Environment(tmp_path_factory.mktemp("training"), packages, wheel)


def ran(environment: Environment, folder: Path, *argv: str, settings: tuple[str, ...] = ()) -> str:
    """The last line of stdout of a command that must succeed."""
    done = environment.jgr(*argv, *(f"--set={setting}" for setting in settings), cwd=folder)
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()[-1]


def test_each_environment_has_what_the_wheel_asks_for(serving: Environment, training: Environment) -> None:
    for environment in (serving, training):
        assert (environment.check.returncode, environment.check.stdout) == (
            0,
            "No broken requirements found.\n",
        )


def test_the_size_of_jgr_is_that_of_its_installed_files(serving: Environment) -> None:
    (folder,) = serving.bin.parent.glob("lib/python*/site-packages/jgr")
    installed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    assert own_mb() == pytest.approx(installed, rel=0.02)  # places of the files stand in what is compiled


def test_the_command_works_without_a_checkout(serving: Environment, tmp_path: Path) -> None:
    assert serving.jgr("--version", cwd=tmp_path).stdout == f"{jgr.__version__}\n"
    shown = serving.jgr("config", "--config=industrial", cwd=tmp_path)
    assert json.loads(shown.stdout) == to_json(load_config(ROOT / "configs" / "industrial.py"))
    listed = serving.jgr("config", "--list", cwd=tmp_path)
    assert [line.split()[0] for line in listed.stdout.splitlines()[:-1]] == named.names()


@pytest.mark.parametrize("argv", [("train", "--config=industrial"), ("demo",), ("convert",)])
def test_a_missing_extra_is_one_line(serving: Environment, tmp_path: Path, argv: tuple[str, ...]) -> None:
    done = serving.jgr(*argv, cwd=tmp_path)
    missing = f"jgr: jgr {argv[0]} needs grain, matplotlib, optax, orbax: pip install 'jgr[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", missing)


def test_a_researcher_from_a_log_of_ratings_to_served_models(
    training: Environment, serving: Environment, tmp_path: Path
) -> None:
    rows = log()
    write(tmp_path / "raw", "csv", rows)
    run = partial(ran, training, tmp_path)
    run("prepare", "--source=generic", "--raw=raw", "--out=data")
    run("ids", "--data=data", "--method=balanced", "--sizes=4,4", "--dims=4")
    run("ids", "--data=data", "--name=items", "--method=item")
    data = ("data.kind=prepared", "data.path=data")
    generator = ("model.name=generator", "train.out=runs/generator")
    assert run("train", "--config=shop", settings=(*data, *generator, *TINY)) == "runs/generator"
    scorer = (
        "model.name=scorer",
        "train.out=runs/scorer",
        "data.catalog=items",
        "train.model=stu",
        "train.dropout=0",
    )
    tasks = ("feedback.tasks=rating_from_4",)
    assert run("train", "--config=shop", settings=(*data, *TINY, *scorer, *tasks)) == "runs/scorer"
    assert (tmp_path / "runs/generator/curves.png").read_bytes().startswith(b"\x89PNG")

    with serving.serve("runs/generator", "runs/scorer", cwd=tmp_path) as url:
        with jgr.Client(url, model="generator") as client:
            found = client.recommend(["i0", "i2"], top_k=3, include_metadata=True, exclude_history=True).items
            assert [item.metadata for item in found] == [{"title": f"Item {item.item_id}"} for item in found]
            assert len(found) == 3 and not {"i0", "i2"} & {item.item_id for item in found}
        for path, word in PAGES.items():
            assert word in looked_at(url + path)

        report = json.loads(run("evaluate", "runs/generator", f"--url={url}", "--k=1,5", "--resamples=20"))
        assert list(report["rows"]) == [*BASELINES, "generator"]
        assert report["examples"] == len({row.user for row in rows})
        curve = ("--sweep=beam.width=4,8", "--plot=curve.png", "--k=1,4", "--resamples=0", "--requests=4")
        report = json.loads(run("evaluate", "runs/generator", f"--url={url}", *curve))
        assert [point["value"] for point in report["points"]] == ["4", "8"]
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
        report = json.loads(run("evaluate", "runs/scorer", "--feedback", f"--url={url}", "--resamples=0"))
        assert report["model"] == "scorer" and report["impressions"] > 0


def looked_at(address: str, context: ssl.SSLContext | None = None) -> bytes:
    """A page, without a key, as a browser opens it: with every script and style sheet that it names."""

    def content(at: str) -> bytes:
        with urllib.request.urlopen(at, timeout=PATIENCE_S, context=context) as reply:
            assert reply.status == 200
            found: bytes = reply.read()
        return found

    page = content(address)
    named = re.findall(r'<(?:script|link)\b[^>]*? (?:src|href)="(?!data:)([^"]+)"', page.decode())
    assert len(named) >= 2 and all(content(urllib.parse.urljoin(address, each)) for each in named)
    return page


KEYS = [
    {"name": "shop", "key": "d41f0a7c5be94a1f", "role": "client"},
    {"name": "prometheus", "key": "0c2f6b1de07a4d3b", "role": "client"},
    {"name": "ops", "key": "7be1d9c3a5584e20", "role": "admin"},
]
SHOP, WATCH, OPS = (each["key"] for each in KEYS)
ITEMS = {"10": ["<a_1>", "<b_0>"], "11": ["<a_1>", "<b_2>"], "12": ["<a_0>", "<b_0>"]}


class Deployed:
    """A server behind https with keys, below a base path; asked as an engineer would by hand."""

    def __init__(self, url: str, ca_file: Path) -> None:
        self.url, self.ca_file = f"{url}/jgr", ca_file
        self.context = ssl.create_default_context(cafile=ca_file)

    def call(self, path: str, key: str, body: bytes | None = None) -> bytes:
        """The answer to a GET, or with a body to a POST."""
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.context) as reply:
            content: bytes = reply.read()
        return content

    def reload(self) -> str:
        """Reload the model, and wait until that is over: its version."""
        self.call("/v1/models/shop/reload", OPS, b"")
        model = {"reload": "running"}
        while model["reload"] == "running":
            model = json.loads(self.call("/v1/models/shop", SHOP))
        assert model["reload"] == "done", model
        return model["version"]


def test_a_serving_engineer_from_a_published_model_to_reloads_under_load(
    training: Environment, serving: Environment, tmp_path: Path
) -> None:
    lines = [
        {"item_id": item, "semantic_id": sid, "metadata": {"title": item}} for item, sid in ITEMS.items()
    ]
    (tmp_path / "catalog.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for seed, name in enumerate(("v1", "v2")):
        published(tmp_path / f"hf-{name}", "qwen2", NAMES, seed)
        convert = (
            "convert",
            f"hf-{name}",
            "--items=catalog.jsonl",
            "--family=minionerec",
            f"--out=models/{name}",
        )
        assert ran(training, tmp_path, *convert) == f"models/{name}"
    now = tmp_path / "models" / "now"
    now.symlink_to("v1")
    pems = make_pems(tmp_path)
    (tmp_path / "keys.json").write_text(json.dumps({"keys": KEYS}))
    (tmp_path / "keys.json").chmod(0o600)
    settings = (
        "server.keys=keys.json", "server.tls_certificate=certificate.pem", "server.tls_key=key.pem",
        "server.base_path=/jgr", "server.open_ui=true", "model.name=shop", "beam.width=3",
        "profiles.batch=1", "profiles.widths=3", "profiles.candidates=3",
    )  # fmt: skip
    with serving.serve("models/now", *(f"--set={one}" for one in settings), cwd=tmp_path) as url:
        server = Deployed(url, pems["authority"])
        with jgr.Client(server.url, SHOP, ca_file=server.ca_file) as client:
            best = [item.item_id for item in client.recommend(["10"], top_k=3).items]
            assert sorted(best) == sorted(ITEMS)
        with jgr.Client(server.url, "0" * 16, ca_file=server.ca_file) as stranger:
            with pytest.raises(jgr.Unauthorized):
                stranger.recommend(["10"])
        assert PAGES["/ui"] in looked_at(f"{server.url}/ui", server.context)
        with pytest.raises(urllib.error.HTTPError, match="401"):  # the page is open, and nothing else
            looked_at(f"{server.url}/metrics", server.context)
        assert kserve(server) == best
        assert generated(server, tmp_path) == best
        under_load(server, serving, tmp_path)
        metrics = server.call("/metrics", WATCH).decode()
        (overview,) = (board for board in BOARDS if board.name == "overview")
        names = {name for p in overview.panels for query, _ in p.queries for name in families(query)}
        assert {name for name in names if f"# TYPE {name}" not in metrics} == set()


def kserve(server: Deployed) -> list[str]:
    """The items by Triton's client."""
    options = {"ca_certs": str(server.ca_file)}
    address = server.url.removeprefix("https://")
    with closing(tritonclient.http.InferenceServerClient(address, ssl=True, ssl_options=options)) as client:
        history = tritonclient.http.InferInput("history", [1], "BYTES")
        history.set_data_from_numpy(np.array([b"10"], np.object_))
        top_k = tritonclient.http.InferInput("top_k", [1], "INT32")
        top_k.set_data_from_numpy(np.array([3], np.int32))
        found = client.infer("recommend", [history, top_k], headers={"Authorization": f"Bearer {SHOP}"})
        return [item.decode() for item in found.as_numpy("item_ids")]


def generated(server: Deployed, folder: Path) -> list[str]:
    """The items by a client that openapi-python-client makes of what the server says of itself."""
    (folder / "openapi.json").write_bytes(server.call("/openapi.json", SHOP))
    (folder / "client.yml").write_text(
        "post_hooks: []\npackage_name_override: jgr_journey\n"
        "content_type_overrides:\n  application/x-ndjson: application/octet-stream\n"
    )
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta=none", "--fail-on-warning"]
    paths = ["--path=openapi.json", "--config=client.yml", "--output-path=jgr_journey"]
    subprocess.run([*command, *paths], cwd=folder, check=True, capture_output=True)
    sys.path.insert(0, str(folder))
    try:
        made, models = importlib.import_module("jgr_journey"), importlib.import_module("jgr_journey.models")
        recommend: Any = importlib.import_module("jgr_journey.api.requests.recommend")
    finally:
        sys.path.remove(str(folder))
    with made.AuthenticatedClient(server.url, SHOP, verify_ssl=server.context) as client:
        answer = recommend.sync(client=client, body=models.RecommendRequest(history=["10"], top_k=3))
    return [item.item_id for item in answer.items]


def under_load(server: Deployed, environment: Environment, folder: Path) -> None:
    """A reload of another version while requests come: none fails. A slow machine gets a longer load."""
    shape = [
        "--rate=20",
        "--arrivals=constant",
        "--history_length=2",
        "--top_k=3",
        "--deadline_ms=60000",
        f"--api_key={SHOP}",
    ]
    command = ["bench", "serve", "models/v1", f"--url={server.url}", f"--ca_file={server.ca_file}", *shape]
    versions = {json.loads(server.call("/v1/models/shop", SHOP))["version"]}
    for name, seconds in (("v2", 3), ("v1", 12), ("v2", 48)):
        with subprocess.Popen(
            [str(environment.bin / "jgr"), *command, f"--duration={seconds}"],
            cwd=folder, env=environment.env, text=True, stdout=subprocess.PIPE,
        ) as load:  # fmt: skip
            answered = requests(server)
            while requests(server) == answered and load.poll() is None:
                pass
            (folder / "models" / "next").symlink_to(name)
            (folder / "models" / "next").rename(folder / "models" / "now")
            versions.add(server.reload())
            reloaded_under_load = load.poll() is None
            assert load.stdout is not None
            report = json.loads(load.stdout.read().splitlines()[-1])
        assert report["failed"] == {} and report["answered"] == {"200": 20 * seconds}, report
        if reloaded_under_load:
            break
    else:
        raise AssertionError("no reload ended while the load went on")
    assert len(versions) == 2


def requests(server: Deployed) -> float:
    """How many recommend requests were answered."""
    lines = server.call("/metrics", WATCH).decode().splitlines()
    series = 'jgr_requests_total{endpoint="/v1/recommend",status="200"} '
    return sum(float(line.removeprefix(series)) for line in lines if line.startswith(series))


def test_a_systems_researcher_counts_what_a_mechanism_of_each_system_does(
    training: Environment, tmp_path: Path
) -> None:
    def counts(
        system: str, mechanism: str, *settings: str, argv: tuple[str, ...] = ()
    ) -> list[dict[str, int]]:
        """What was counted with all on, without the mechanism, and with all off."""
        shape = ("--quick", "--requests=4", "--rounds=1", "--concurrency=1", "--users=2", *argv)
        command = ("ablate", system, f"--only={mechanism}", *shape, f"--out={system}.json")
        ran(training, tmp_path, *command, settings=settings)
        variants = json.loads((tmp_path / f"{system}.json").read_text())["variants"]
        assert [one["name"] for one in variants] == ["all on", f"without {mechanism}", "all off"]
        assert all(one["answers"]["right"] for one in variants)
        return [one["counts"] for one in variants]

    ranker = ("prompt.max_items=8", "rank.tokens=256", "rank.context=256", "rank.candidates=8")
    on, without, off = counts("bat", "users-first", *ranker, "profiles.tokens=256", argv=("--candidates=6",))
    assert off["reused"] == 0 and off["runs"] == 4
    assert [one["computed"] + one["reused"] for one in (on, without)] == [off["computed"]] * 2
    assert min(on["reused"], without["reused"]) > 0
    assert (without["user first"], without["items first"]) == (0, 4)
    assert on["user first"] + on["items first"] == 4

    searcher = ("prompt.max_items=8", "beam.width=4", "profiles.widths=4", "profiles.tokens=32")
    on, without, off = counts("xgr", "batches", *searcher, argv=("--concurrency=4",))
    assert on["asked tokens"] == without["asked tokens"] == off["asked tokens"]
    assert off["asked tokens"] < off["padded tokens"] == without["padded tokens"] <= on["padded tokens"]
    assert on["runs"] <= without["runs"] == off["runs"] == 4

    on, without, off = counts("flame", "feature-cache", "executors.sizes=8", argv=("--candidates=8",))
    assert [one["looked up"] for one in (on, without, off)] == [4 * 8] * 3
    assert [one["missing"] for one in (on, without, off)] == [0] * 3
    assert on["fetched"] < without["fetched"] == off["fetched"] == 4 * 8
    assert on["store bytes"] * without["fetched"] == without["store bytes"] * on["fetched"] > 0
