# SPDX-License-Identifier: Apache-2.0
"""Histories with texts, and a library that stands for their tokens (RCLLM-5, 9, 16), over real HTTP: an answer is that
of a dense decoder in numpy in which those tokens have the keys and values of their prototypes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers

from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.cli.main import run as run_command
from jgr.config import Config, PromptConfig, UserError, override
from jgr.library.build import build
from jgr.library.corpus import Corpus
from jgr.library.embeddings import BUCKET
from jgr.library.folder import KV, LibraryFolder
from jgr.models import checkpoint, decoder, params
from jgr.models.model_files import ModelFiles
from jgr.prompt.tokens import PromptBuilder, PromptError, Tokenizer, template_prefix
from jgr.serving.api import RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import PagedExecutor
from jgr.serving.policies.prototypes import KIND, PrototypePlace
from jgr.serving.policies.sources import Run
from tests.serving.decoders.dense import Dense
from tests.serving.decoders.test_cached_server import N_ITEMS, Served, ids, make_config, scores

WORDS = [f"w{n}" for n in range(30)]
CATALOG = Catalog.build(
    [f"i{n}" for n in range(N_ITEMS)], [[f"<a_{n}>"] for n in range(N_ITEMS)], [{}] * N_ITEMS
)
TEMPLATE, ITEM = "<bos>w0{history}<sid>", "{sid}w1{review}w2"
LEAD = 2  # tokens of the template before the history
Float64 = npt.NDArray[np.float64]


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def make_tokenizer() -> Tokenizer:
    special = ["<pad>", "<bos>", "<sid>", "<unk>", *(f"<a_{n}>" for n in range(N_ITEMS))]
    vocabulary = {name: number for number, name in enumerate([*special, *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
    return Tokenizer(inner)


TOKENIZER = make_tokenizer()
RNG = np.random.default_rng(3)
REVIEWS = [np.array(TOKENIZER.encode(words(*RNG.integers(3, 20, n))), np.int32) for n in (12, 8, 20, 5)]
TEXTS = ["w3 w4 w5 w25 w26", "", words(*RNG.integers(3, 24, 9))]


class World(NamedTuple):
    config: Config
    dense: Dense
    library: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model with random weights, and a library of half of its words."""
    folder = tmp_path_factory.mktemp("model")
    config = override(
        make_config(tmp_path_factory.mktemp("other")),
        f"model.path={folder}",
        f"prompt.template={TEMPLATE}",
        f"prompt.item={ITEM}",
        "prompt.max_items=4",
        "prompt.review_tokens=10",
        "rank.item=w1{sid}",
        "rank.item_span=2",
        "rank.tokens=64",
        "rank.context=64",
        "rank.requests=2",
        "profiles.batch=1",
        "profiles.tokens=64",
        "cache.new_tokens=64",
        "cache.policy=blocks",
        "cache.repair_tokens=2",  # items are computed whole, so that the library alone approximates
        "cache.repair_share=0.5",
        "cache.library_share=0.25",
        "cache.repair_by=attention",
        "cache.item_share=0.25",
    )
    made = decoder.DecoderConfig("qwen3", TOKENIZER.vocab_size, 32, 2, 2, 2, 16, 48, 1e4, 1e-6, True, 160)
    drawn = jax.tree.map(lambda x: x * 3, params.initialize(decoder.spec(made), jax.random.key(0)))

    def write_beside(folder: Path) -> None:
        TOKENIZER.save(folder / "tokenizer.json")
        save_catalog(CATALOG, folder / "catalog.jsonl")

    checkpoint.save(folder, made, drawn, write_beside)
    out = tmp_path_factory.mktemp("made") / "library"
    cfg, loaded = checkpoint.load(folder)
    assert isinstance(cfg, decoder.DecoderConfig) and isinstance(loaded, decoder.DecoderParams)
    prefix = template_prefix(config.prompt, TOKENIZER)
    build(
        out,
        loaded,
        cfg,
        ModelFiles(folder).revision(),
        prefix,
        Corpus(REVIEWS, []),
        lambda *_: None,
        most=500,
    )
    return World(override(config, f"cache.library={out}"), Dense(cfg, loaded), out)


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    server = Served(override(world.config, "server.explain=true", "server.max_text_bytes=200"))
    yield server
    server.stop()


class Prompt:
    """A prompt in plain order, made here: history with texts, candidates, instruction."""

    def __init__(self, history: list[int], texts: list[str], rows: list[int], most: int = 10) -> None:
        sid, (w0, w1, w2) = TOKENIZER.token_id, (TOKENIZER.encode(f"w{n}")[0] for n in range(3))
        code = [TOKENIZER.vocabulary[f"<a_{n}>"] for n in range(N_ITEMS)]
        kinds: list[tuple[str, int, int]] = [
            ("instruction", TOKENIZER.vocabulary["<bos>"], 0),
            ("instruction", w0, 0),
        ]
        for row, text in list(zip(history, texts, strict=True))[-4:]:
            review = [("review", token, at) for at, token in enumerate(TOKENIZER.encode(text)[:most])]
            kinds += [("structure", code[row], 0), ("structure", w1, 0), *review, ("structure", w2, 0)]
        self.user = len(kinds)
        for row in rows:
            kinds += [("item", w1, 0), ("item", code[row], 0)]
        kinds.append(("instruction", TOKENIZER.vocabulary["<sid>"], 0))
        assert sid("<sid>") is not None
        self.kinds = [kind for kind, _, _ in kinds]
        self.tokens = np.array([token for _, token, _ in kinds])
        self.places = np.array([place for _, _, place in kinds])
        self.columns = np.array([code[row] for row in rows])

    def near(self, world: World, least: float = 0.9) -> list[tuple[int, int, float]]:
        """By brute force: place in the prompt, prototype and cosine of each review token with one near enough."""
        library = LibraryFolder(
            world.library, json.loads((world.library / "library.json").read_text())["identity"]
        )
        table = np.asarray(world.dense.w.embed)
        half = table.shape[1] // 2

        def embedded(token: int, place: int) -> Any:
            pairs = table[token, :half] + 1j * table[token, half:]
            pairs = pairs * np.exp(1j * (place // BUCKET * BUCKET) * 1e4 ** (-np.arange(half) / half))
            return pairs / np.sqrt((abs(pairs) ** 2).sum())

        prototypes = library.prototypes
        of = [
            embedded(int(REVIEWS[review][place]), int(place))
            for review, place in zip(prototypes.reviews, prototypes.places, strict=True)
        ]
        told = []
        for at in range(self.user):
            if self.kinds[at] == "review":
                own = embedded(int(self.tokens[at]), int(self.places[at]))
                cosines = np.array([np.vdot(each, own).real for each in of])
                if cosines.max() >= least:
                    told.append((at, int(cosines.argmax()), float(cosines.max())))
        return told

    def dense(self, world: World, near: list[tuple[int, int, float]]) -> Float64:
        """Scores where these tokens have the keys and values of their prototypes, which are computed here."""
        dense, layers = world.dense, world.dense.cfg.layers
        given: dict[int, list[tuple[Float64, Float64]]] = {}
        library = LibraryFolder(
            world.library, json.loads((world.library / "library.json").read_text())["identity"]
        )
        for at, prototype, _ in near:
            review, place = (
                int(library.prototypes.reviews[prototype]),
                int(library.prototypes.places[prototype]),
            )
            tokens = np.concatenate([self.tokens[:LEAD], REVIEWS[review]])
            positions = np.arange(len(tokens))
            of_layers = dense.run(tokens, positions, np.tril(np.ones((len(tokens), len(tokens)), bool)))
            turned = np.full(len(tokens), at - LEAD - place)
            given[at] = [(dense._rotate(k, turned)[LEAD + place], v[LEAD + place]) for k, v in of_layers]
        positions = np.arange(len(self.tokens))
        rows = np.array([at for at in positions if at not in given])
        mask = np.tril(np.ones((len(positions), len(positions)), bool))[rows]
        h = dense.embed(self.tokens[rows])
        for layer in range(layers):
            q, own_k, own_v = dense.project(layer, h, positions[rows])
            k, v = (np.zeros((len(positions), *x.shape[1:])) for x in (own_k, own_v))
            k[rows], v[rows] = own_k, own_v
            for at, of_layers in given.items():
                k[at], v[at] = of_layers[layer]
            h = dense.step(layer, h, q, k, v, mask)
        found: Float64 = dense.logits(h[-1:])[0, self.columns]
        return found


ROWS = [20, 21, 25]


def right(
    world: World, answer: dict[str, Any], history: list[int], texts: list[str], share: float = 0.25
) -> Prompt:
    """The answer's scores and counts are those of the prompt with so much of its library computed all the same."""
    prompt = Prompt(history, texts, ROWS)
    near = prompt.near(world)
    selected = math.ceil(share * len(near))
    kept = sorted(sorted(near, key=lambda each: (round(each[2], 5), each[0]))[selected:])
    found = [scores(answer)[f"i{row}"] for row in ROWS]
    np.testing.assert_allclose(found, prompt.dense(world, kept), atol=2e-4)
    usage, items = answer["usage"], 2 * len(ROWS)
    assert usage["prompt_tokens"] == len(prompt.tokens)
    told = usage["approximate_tokens"], usage["repaired_tokens"], usage["exact_tokens"]
    assert told == (len(kept), selected + items, len(prompt.tokens) - len(kept) - selected - items)
    return prompt


def test_tokens_with_a_prototype_take_its_keys_and_values(world: World, served: Served) -> None:
    history = [1, 2, 3]
    answer = served.rank("u", ids(*history), ids(*ROWS), history_texts=TEXTS)
    prompt = right(world, answer, history, TEXTS)
    near = prompt.near(world)
    reviews = prompt.kinds.count("review")
    assert 4 < len(near) < reviews, "some tokens have a prototype, and some have none"
    user = answer["explain"][0]
    assert (user["segment"], user["kept"]) == ("user", False)
    assert user["approximate_tokens"] == user["cached_tokens"] == answer["usage"]["approximate_tokens"]
    whole = prompt.dense(world, [])
    assert max(abs(whole - [scores(answer)[f"i{row}"] for row in ROWS])) > 1e-2, "it is an approximation"

    again = served.rank("u", ids(*history), ids(*ROWS), history_texts=TEXTS)
    assert scores(again) == pytest.approx(scores(answer), abs=1e-5), "the answer does not depend on the cache"
    few, every = served.drifts(1e-4)
    assert few == every > 0, "computed without the cache it is the same"
    assert served.metrics("jgr_repair_drift_count")[0] > 0


def test_a_budget_says_how_many_are_computed_all_the_same(world: World, served: Served) -> None:
    history = [4, 5, 6]
    given = {"history_texts": TEXTS}
    for budget in (0, 0.5):
        answer = served.rank("v", ids(*history), ids(*ROWS), reuse_budget=budget, **given)
        right(world, answer, history, TEXTS, budget)
    whole = served.rank("v", ids(*history), ids(*ROWS), reuse_budget=1, **given)
    prompt = Prompt(history, TEXTS, ROWS)
    found = [scores(whole)[f"i{row}"] for row in ROWS]
    np.testing.assert_allclose(found, prompt.dense(world, []), atol=2e-4)
    assert whole["usage"]["approximate_tokens"] == 0


def test_what_no_prototype_is_near_to_is_computed(world: World, served: Served) -> None:
    """Nothing approximate equals the prompt computed whole, and is kept as every history is."""
    texts = ["w27 w28", "", "w29"]
    history = [7, 8, 9]
    answers = [served.rank("w", ids(*history), ids(*ROWS), history_texts=texts) for _ in range(2)]
    for answer in answers:
        right(world, answer, history, texts)
        assert answer["usage"]["approximate_tokens"] == 0
    first, second = (answer["explain"][0] for answer in answers)
    assert first["kept"] and first["cached_tokens"] == 0 < second["cached_tokens"]
    none = served.rank("x", ids(*history), ids(*ROWS), history_texts=["", "", ""])
    plain = served.rank("y", ids(*history), ids(*ROWS))
    assert scores(none) == pytest.approx(scores(plain), abs=1e-5), "an empty text is none"


def test_spans_say_where_each_part_came_from(world: World, served: Served) -> None:
    body = {"history": ids(1, 2, 3), "candidates": ids(*ROWS), "history_texts": TEXTS, "user_id": "z"}
    told = served.call("/v1/explain/rank", body).json
    spans = told["spans"]
    prompt = Prompt([1, 2, 3], TEXTS, ROWS)
    kinds = [kind for span in spans for kind in [span["kind"]] * span["tokens"]]
    assert kinds[: prompt.user] == prompt.kinds[: prompt.user]
    assert {span["kind"] for span in spans} == {"instruction", "structure", "review", "item"}
    library = [span for span in spans if span["source"] == "library"]
    assert {span["kind"] for span in library} == {"review"}, "only what users wrote is approximated"
    assert sum(span["tokens"] for span in library) == told["answer"]["usage"]["approximate_tokens"] > 0
    assert sum(span["tokens"] for span in spans) == len(prompt.tokens)


def test_texts_are_cut_as_the_prompt_takes_them(world: World, served: Served) -> None:
    """Of a long history the last events, of a long text the first tokens; unknown items go with their texts."""
    texts = ["w3 w4", words(*range(3, 20)), "w5", "w6 w7", "w8", "w9"]
    history = ["i1", "i2", "nothing", "i3", "i4", "i5"]
    body = {"history": history, "candidates": ids(*ROWS), "history_texts": texts}
    reply = served.call("/v1/rank", body)
    assert reply.json["usage"]["unknown_items"] == 1
    right(world, reply.json, [1, 2, 3, 4, 5], [texts[at] for at in (0, 1, 3, 4, 5)])


def test_a_text_cannot_spell_what_is_not_text(world: World, served: Served) -> None:
    spelt = "w3 <bos> <a_7> w4"
    answer = served.rank("s", ids(1), ids(*ROWS), history_texts=[spelt])
    plain = served.rank("t", ids(1), ids(*ROWS), history_texts=["w3 w4"])
    assert scores(answer) == pytest.approx(scores(plain), abs=1e-5)


@pytest.mark.parametrize(
    ("texts", "field", "says"),
    [
        (["one"], "history_texts", "1 texts; history has 2"),
        (["x" * 150, "y" * 51], "history_texts", "more than 200 bytes"),
        (["x" * 100_000, ""], "history_texts", "more than 200 bytes"),
        (["a", 3], "history_texts[1]", "must be text"),
        ("text", "history_texts", "must be a list or null"),
    ],
)
def test_texts_that_do_not_fit_are_refused(served: Served, texts: Any, field: str, says: str) -> None:
    reply = served.call("/v1/rank", {"history": ids(1, 2), "candidates": ids(3), "history_texts": texts})
    assert (reply.status, reply.json["error"]["field"]) == (422, field)
    assert says in reply.json["error"]["message"]


def test_recommending_reads_texts_whole(served: Served) -> None:
    """Generation reads no library; the texts are computed."""
    body = {"history": ids(1, 2), "top_k": 2, "user_id": "r", "explain": True}
    with_texts = served.call("/v1/recommend", {**body, "history_texts": ["w3 w4", "w5"]})
    without = served.call("/v1/recommend", body)
    assert with_texts.status == without.status == 200, with_texts.body
    assert with_texts.json["usage"]["prompt_tokens"] == without.json["usage"]["prompt_tokens"] + 3
    assert with_texts.json["items"][0]["score"] != without.json["items"][0]["score"]


def test_a_lost_pool_has_the_library_again(world: World, served: Served) -> None:
    history = [10, 11, 12]
    before = served.rank("q", ids(*history), ids(*ROWS), history_texts=TEXTS)
    pool = served.engine.served.pool
    assert pool is not None
    pool.lose(pool.epoch, RuntimeError("a test empties it"))
    after = served.rank("q", ids(*history), ids(*ROWS), history_texts=TEXTS)
    assert scores(after) == pytest.approx(scores(before), abs=1e-5)
    right(world, after, history, TEXTS)


def test_a_library_that_could_not_be_written_is_written_before_the_next_answer(
    world: World, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, pool = [13, 14, 15], served.engine.served.pool
    assert pool is not None
    pool.lose(pool.epoch, RuntimeError("a test empties it"))
    epoch = pool.epoch

    def fails(*arguments: Any) -> None:
        raise MemoryError("no room for the values")

    with monkeypatch.context() as broken:
        broken.setattr(PagedExecutor, "put", fails)
        body = {"history": ids(*history), "candidates": ids(*ROWS), "history_texts": TEXTS}
        assert served.call("/v1/rank", body).status == 500
    answer = served.rank("p", ids(*history), ids(*ROWS), history_texts=TEXTS)
    assert pool.epoch == epoch, "the library stands where it was placed at first"
    right(world, answer, history, TEXTS)


def refused(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        load_engine(config)
    return str(caught.value)


def test_a_library_that_does_not_fit_is_refused_at_the_start(world: World, tmp_path: Path) -> None:
    config = world.config
    assert f"there is no folder {tmp_path}/none" in refused(
        override(config, f"cache.library={tmp_path}/none")
    )
    assert "of another model" in refused(override(config, "prompt.template=<bos>{history}<sid>"))
    assert "{review} in prompt.item" in refused(override(config, "prompt.item={sid}"))
    assert "cache.policy=blocks" in refused(override(config, "cache.policy=item"))
    assert "cache.device_mb" in refused(override(config, "cache.device_mb=0.01", "cache.page_kb=2"))
    assert "server.journal" in refused(override(config, f"server.journal={tmp_path}/journal"))
    cut = tmp_path / "cut"
    cut.mkdir()
    for file in world.library.iterdir():
        whole = file.read_bytes()
        (cut / file.name).write_bytes(whole[: len(whole) // 2] if file.name == KV else whole)
    assert f"{cut / KV}: cannot be read, or is cut short" in refused(override(config, f"cache.library={cut}"))


def test_a_server_without_a_place_for_texts_refuses_them(world: World) -> None:
    config = override(
        world.config, "cache.library=", "prompt.item={sid}", "rank.method=likelihood", "cache.policy=none"
    )
    engine = load_engine(override(config, "cache.repair_share=0", "cache.repair_tokens=0"))
    request = RankRequest(history=["i1"], candidates=["i2"], history_texts=["w3"])
    with pytest.raises(Exception, match=r"no \{review\} for texts"):
        asyncio.run(engine.served.read(request))


@pytest.mark.parametrize("item", ["{review}", "{sid}{review}{review}", "{sid}{{{review}}}"])
def test_a_template_has_one_place_for_a_text_beside_the_item(item: str) -> None:
    with pytest.raises(PromptError, match=r"prompt\.item"):
        PromptBuilder(PromptConfig(template=TEMPLATE, item=item), TOKENIZER, CATALOG)


def test_the_place_in_the_pool_is_found_by_runs() -> None:
    """Prototype n stands at place n of the entry, whose cells are not in order."""
    meta = CacheMeta(Pages(4, 64), {KIND: Room(32, 2, 3)})
    place = PrototypePlace(meta, 7, cell_tokens=3, parts=2)
    cells = place.cells()
    assert cells is not None and len(cells) == 6
    assert [placed.cells for placed in place.take()] == [cells] and not place.take()
    span = place.span(Run(first=4, tokens=3, prototype=2, place=5), cells, 40)
    assert (span.tokens, span.cells, span.shift, span.first) == (3, cells[:4], 35, 2)
    assert place.span(Run(0, 1, 6, 0), cells, 8).cells == cells[4:]
    meta.renew(1)
    again = place.cells()
    assert again is not None and [placed.epoch for placed in place.take()] == [1]
    meta.check()
    place.close()
    meta.close()


def test_the_command_builds_what_the_server_reads(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [{"user_id": f"u{n}", "text": words(*RNG.integers(3, 20, 6))} for n in range(40)]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sets = [f"--set=model.path={world.config.model.path}", f"--set=prompt.template={TEMPLATE}"]
    sets += [f"--set=prompt.item={ITEM}", "--set=model.compilation_cache="]
    out = tmp_path / "library"
    command = ["kv", "library", *sets, f"--texts={texts}", "--held_out=0.3", f"--out={out}"]
    assert run_command(command) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    library = json.loads((out / "library.json").read_text())
    assert library["identity"] == json.loads((world.library / "library.json").read_text())["identity"]
    assert told["prototypes"] == library["prototypes"] > 0 and told["held_out_tokens"] > 0
    assert told["coverage"][-1]["at_99"] > 0.5 and told["recall"] >= 0.95


def test_the_command_says_where_nothing_was_held_out(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": words(3, 4, 5)}) + "\n")
    sets = [f"--set=model.path={world.config.model.path}", f"--set=prompt.template={TEMPLATE}"]
    sets += [f"--set=prompt.item={ITEM}", "--set=model.compilation_cache=", "--held_out=0"]
    assert run_command(["kv", "library", *sets, f"--texts={texts}", f"--out={tmp_path / 'library'}"]) == 0
    *printed, told = capsys.readouterr().out.splitlines()
    assert json.loads(told)["coverage"] == []
    assert printed[-1] == "no text was held out, so nothing says how much the library covers; see --held_out"


def test_a_place_that_is_taken_is_told_before_the_model_is_loaded(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jgr.serving.decoders.library.library_model", None)  # a call of it would end with 1
    command = [
        "kv",
        "library",
        f"--set=model.path={world.config.model.path}",
        "--texts=x",
        f"--out={tmp_path}",
    ]
    assert run_command(command) == 2
    assert "is there already" in capsys.readouterr().err
