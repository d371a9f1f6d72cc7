# SPDX-License-Identifier: Apache-2.0
"""A real model behind the real server: answers equal the model's own, however requests meet, and nothing compiles."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jgr
from jgr.catalog.catalog import load_catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config, UserError, override
from jgr.models import beam, checkpoint
from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.serve import Engine
from jgr.serving.engine.compilation import use_compilation_cache
from jgr.serving.http.listener import Listener
from tests.serving.tiny_model import MAX_ITEMS, N_ITEMS, make_folder


class Served:
    def __init__(self, config: Config, ca_file: Path | None = None) -> None:
        self.config, self.ca_file = config, ca_file
        self.engine: Engine = load_engine(config)
        self._ready = threading.Event()
        self.told: list[tuple[int, int]] = []
        listener = Listener(
            self.engine,
            config,
            on_progress=lambda done, total, label: self.told.append((done, total)),
            on_ready=lambda url: self._ready.set(),
        )
        self._listener, self._thread = (
            listener,
            threading.Thread(target=listener.serve_until_stopped, daemon=True),
        )
        self._thread.start()
        assert self._ready.wait(300)
        self.url = listener.url + config.server.base_path
        self.client = jgr.Client(self.url, ca_file=ca_file)
        folder = Path(config.model.path)
        self.catalog = load_catalog(folder / "catalog.jsonl")
        self.tree = PrefixTree.build(self.catalog.codes)
        self.cfg, self.params = checkpoint.load(folder)
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
        self.tables = beam.catalog_tables(
            self.tree, level_tokens(self.catalog, tokenizer, self.cfg.vocab_size), self.params
        )
        self.prompts = PromptBuilder(config.prompt, tokenizer, self.catalog)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.client.fetch("POST", path, json.dumps(body).encode(), dict[str, Any])

    def stop(self) -> int:
        self.client.close()
        self._listener.stop()
        self._thread.join()
        return self._listener.exit_code

    def likelihoods(self, rows: list[int]) -> np.ndarray:
        """Log-likelihood of every item after a history of rows, from the model alone, unpadded: [n]."""
        prompt = self.prompts.build(np.array(rows, np.int32))
        leaves = np.arange(self.tree.n_leaves, dtype=np.int32)[None]
        scores = beam.rank(
            self.params, self.tables, prompt[None], np.array([len(prompt)], np.int32), leaves, cfg=self.cfg
        )
        return np.asarray(scores)[0][self.tree.leaf_of_row]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(override(make_folder(tmp_path_factory.mktemp("model") / "tiny"), "profiles.tokens=32"))
    yield served
    assert served.stop() == 0


def history(seed: int, length: int) -> list[int]:
    return [int(row) for row in np.random.default_rng(seed).choice(N_ITEMS, length, replace=False)]


def body(rows: list[int], **fields: Any) -> dict[str, Any]:
    return {"history": [f"B{row:03}" for row in rows], **fields}


def test_rank_gives_the_models_likelihoods_best_first(served: Served) -> None:
    rows, candidates = history(0, 7), [5, 50, 17, 3, 42]
    answer = served.post("/v1/rank", body(rows, candidates=[f"B{c:03}" for c in candidates]))
    want = served.likelihoods(rows)[candidates]
    order = np.argsort(-want, kind="stable")
    assert [item["item_id"] for item in answer["items"]] == [f"B{candidates[i]:03}" for i in order]
    np.testing.assert_allclose([item["score"] for item in answer["items"]], want[order], atol=1e-4)
    assert answer["model"] == served.engine.info.version
    assert re.fullmatch("tiny@[0-9a-f]{8}", answer["model"])
    assert answer["catalog_version"] == served.catalog.version
    assert answer["normalize"] == "valid"


def test_recommend_scores_are_the_models_likelihoods_of_real_items(served: Served) -> None:
    rows = history(1, 4)
    answer = served.post("/v1/recommend", body(rows, top_k=16, beam_width=16, include_metadata=True))
    want = served.likelihoods(rows)
    found = [served.catalog.row(item["item_id"]) for item in answer["items"]]
    assert len(found) == 16 and None not in found and len(set(found)) == 16
    np.testing.assert_allclose([item["score"] for item in answer["items"]], want[found], atol=1e-4)
    assert [item["rank"] for item in answer["items"]] == list(range(1, 17))
    assert [item["metadata"] for item in answer["items"]] == [{"title": f"Item {row}"} for row in found]


def test_a_greedy_first_item_is_in_a_wider_search(served: Served) -> None:
    rows = history(2, 3)
    narrow = served.post("/v1/recommend", body(rows, top_k=1, beam_width=1))["items"][0]
    wide = served.post("/v1/recommend", body(rows, top_k=16, beam_width=16))["items"]
    assert narrow["score"] <= wide[0]["score"] + 1e-4


def test_the_history_can_be_left_out(served: Served) -> None:
    rows = history(3, 10)
    answer = served.post("/v1/recommend", body(rows, top_k=16, beam_width=16, exclude_history=True))
    assert {item["item_id"] for item in answer["items"]}.isdisjoint(body(rows)["history"])


def test_concurrent_requests_of_all_sizes_get_the_answers_they_get_alone(served: Served) -> None:
    """Batches mix lengths and widths; neither neighbours, padding nor profile change a score."""
    bodies = [
        (
            "/v1/recommend",
            body(history(seed, 1 + seed % MAX_ITEMS), top_k=1 + seed % 8, beam_width=8 + seed % 9),
        )
        for seed in range(24)
    ] + [
        (
            "/v1/rank",
            body(
                history(seed, 1 + seed % MAX_ITEMS),
                candidates=[f"B{c:03}" for c in history(seed, 1 + seed % 16)],
            ),
        )
        for seed in range(24)
    ]
    alone = [served.post(path, request) for path, request in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: served.post(*request), bodies))
    for one, other in zip(alone, together, strict=True):
        scores = np.array([item["score"] for item in one["items"]])
        np.testing.assert_allclose([item["score"] for item in other["items"]], scores, atol=1e-4)
        gaps = np.abs(np.diff(scores, prepend=np.inf, append=-np.inf))
        for i in range(len(scores)):
            if min(gaps[i], gaps[i + 1]) > 2e-4:  # nearer scores may change places, and items may share an id
                assert one["items"][i]["item_id"] == other["items"][i]["item_id"]


def compilations(served: Served, phase: str) -> float:
    with urllib.request.urlopen(f"{served.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    line = next(line for line in lines if line.startswith(f'jgr_compilations_total{{phase="{phase}"}}'))
    return float(line.split()[-1])


def test_the_warm_up_tells_how_many_shapes_there_are_before_the_first_is_compiled(served: Served) -> None:
    shapes = len(served.engine.served.executors.profiles)
    assert served.told == [(done, shapes) for done in range(shapes + 1)]


def test_nothing_compiles_after_warm_up(served: Served) -> None:
    before = compilations(served, "load"), compilations(served, "request")
    assert before[0] > 0  # what was not compiled by an earlier test
    for length in range(1, 20):
        served.post("/v1/recommend", body(history(length, length), top_k=5, exclude_history=True))
        served.post("/v1/rank", body(history(length, length), candidates=["B001", "B002"]))
    assert (compilations(served, "load"), compilations(served, "request")) == before


def test_a_long_history_uses_its_last_items(served: Served) -> None:
    rows = history(5, 40)
    answers = [served.post("/v1/recommend", body(h, top_k=8)) for h in (rows, rows[-MAX_ITEMS:])]
    assert [i["item_id"] for i in answers[0]["items"]] == [i["item_id"] for i in answers[1]["items"]]


def test_the_client_reports_the_servers_words(served: Served) -> None:
    with pytest.raises(jgr.InvalidRequest, match="top_k"):
        served.post("/v1/recommend", body([1], top_k=9))


def remove_folder(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()


def other_architecture(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    (folder / "digests.json").unlink()  # which would name the changed file


def foreign_catalog(folder: Path) -> None:
    line = {"item_id": "X", "semantic_id": ["<a_0>", "<b_99>", "<c_1>"], "metadata": {}}
    (folder / "catalog.jsonl").write_text(json.dumps(line) + "\n")


def catalog_beyond_the_vocabulary(folder: Path) -> None:
    line = {"item_id": "X", "token_ids": [3, 999_999], "metadata": {}}
    (folder / "catalog.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (remove_folder, "no such model folder"),
        (other_architecture, "parameters do not fit the config"),
        (foreign_catalog, "<b_99>"),
        (catalog_beyond_the_vocabulary, "999999"),
        (lambda folder: (folder / "catalog.jsonl").unlink(), "catalog.jsonl"),
        (lambda folder: (folder / "catalog.jsonl").write_text("{"), "catalog.jsonl:1"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(breaks: Any, words: str, tmp_path: Path) -> None:
    config = make_folder(tmp_path / "tiny")
    breaks(tmp_path / "tiny")
    with pytest.raises(UserError, match=re.escape(words)):
        load_engine(config)


def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())"]
    path = tmp_path / "nothing"
    done = subprocess.run([*command, "serve", f"--set=model.path={path}"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == f"jgr: {path}: no such model folder (model.path)"


def test_a_cache_folder_that_cannot_be_made_is_not_fatal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    use_compilation_cache(tmp_path / "file" / "cache")
    assert "no compilation cache" in caplog.text


def test_a_second_start_reads_its_programs_from_disk(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "tiny", layers=1, depth=1)
    small = ("profiles.batch=1", "profiles.tokens=32", "profiles.widths=8", "profiles.candidates=4")
    config = override(config, *small, f"model.compilation_cache={tmp_path / 'cache'}")
    before = jax.config.jax_compilation_cache_dir
    try:
        hits: list[str] = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
        for start in range(2):
            hits.clear()
            engine = load_engine(config, kinds=("rank",))
            engine.served.executors.warm_up(lambda done, total, label: None)
            del engine  # its programs go with it
            programs = [e for e in hits if e == "/jax/compilation_cache/cache_hits"]
            assert bool(programs) == (start == 1)
            assert list((tmp_path / "cache").glob("*-cache")), "they are in the folder that the setting names"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
