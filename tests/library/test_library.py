# SPDX-License-Identifier: Apache-2.0
"""Libraries of prototypes (RCLLM-2..4, 16): the search against brute force, clusters by their definition, the files,
and the keys and values against a decoder in numpy.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.config import UserError
from jgr.library import building, clusters, folder, index
from jgr.library.build import REUSED_FROM, _batch_kv, _batches, build, search_for
from jgr.library.corpus import Corpus, is_held_out, read_corpus
from jgr.library.embeddings import BUCKET, TokenEmbeddings, keys_of
from jgr.library.finder import Finder
from jgr.library.folder import LibraryFolder, identity
from jgr.models import decoder, params
from jgr.prompt.tokens import Tokenizer
from tests.serving.decoders.dense import Dense

CFG = decoder.DecoderConfig("qwen3", 40, 16, 2, 2, 1, 8, 24, 1e4, 1e-6, True, 256)
PARAMS = jax.tree.map(lambda x: 3 * x, params.initialize(decoder.spec(CFG), jax.random.key(1)))
PREFIX = np.array([1, 2, 1], np.int32)
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(300, 24)).astype(np.float32)
EMBEDDINGS = TokenEmbeddings(TABLE, 1e4)
Int32 = npt.NDArray[np.int32]


def like_words(seed: int, reviews: int, vocabulary: int = 300) -> list[Int32]:
    """Reviews whose tokens are as unequally frequent as words."""
    rng = np.random.default_rng(seed)
    return [
        np.minimum(rng.zipf(1.3, rng.integers(1, 90)), vocabulary - 1).astype(np.int32)
        for _ in range(reviews)
    ]


def by_definition(tokens: Int32) -> npt.NDArray[np.complex128]:
    """Position-aware embeddings of a review's tokens, pairs of dimensions as complex numbers, each of length 1."""
    half = TABLE.shape[1] // 2
    found = []
    for place, token in enumerate(tokens.tolist()):
        pairs = TABLE[token, :half].astype(np.float64) + 1j * TABLE[token, half:]
        turned = pairs * np.exp(1j * (place // BUCKET * BUCKET) * 1e4 ** (-np.arange(half) / half))
        found.append(turned / np.sqrt((abs(turned) ** 2).sum()))
    return np.array(found)


def test_embeddings_are_rotated_by_buckets_of_positions() -> None:
    tokens = RNG.integers(0, 300, 100).astype(np.int32)
    wanted = by_definition(tokens)
    found = EMBEDDINGS.of(keys_of(tokens))
    np.testing.assert_allclose(found, np.concatenate([wanted.real, wanted.imag], axis=1), atol=1e-5)
    same = np.full(70, 7, np.int32)
    cosines = EMBEDDINGS.of(keys_of(same)) @ EMBEDDINGS.of(keys_of(same))[0]
    assert np.allclose(cosines[:32], 1, atol=1e-5) and cosines[32] == pytest.approx(cosines[63])
    assert cosines[32] < 0.99


def test_the_search_finds_what_brute_force_finds() -> None:
    """With vectors near to others but equal to none, which is harder than any token. The spec's settings do not."""
    vectors = RNG.normal(size=(3000, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:400] + RNG.normal(size=(400, 32)).astype(np.float32) * 0.3 / np.sqrt(32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    wanted = index.nearest_of_all(vectors, queries)
    np.testing.assert_allclose(wanted[1], (queries @ vectors.T).max(axis=1), atol=1e-6)
    published = index.LshIndex(vectors, index.Settings(4, 18, 0)).nearest(queries)[1]
    assert 0.3 < index.recall(published, wanted[1], 0.9) < 0.8
    chosen, told = index.tuned(vectors, queries, 0.9)
    numbers, cosines = index.LshIndex(vectors, chosen).nearest(queries)
    share = index.recall(cosines, wanted[1], 0.9)
    assert share == told >= index.LEAST_RECALL
    hits = numbers >= 0
    np.testing.assert_allclose(cosines[hits], (queries[hits] * vectors[numbers[hits]]).sum(axis=1), atol=1e-5)
    assert (
        numbers[hits & (cosines > wanted[1] - 1e-6)] == wanted[0][hits & (cosines > wanted[1] - 1e-6)]
    ).all()


def test_the_search_is_chosen_by_tokens_that_need_one() -> None:
    """Most held-out tokens are prototypes; the others are each near to one, and seldom in the same buckets."""
    noise = np.random.default_rng(0).normal(size=(150, 24)) / np.sqrt(24)
    alike = TABLE[:150] + 0.33 * np.linalg.norm(TABLE[:150], axis=1, keepdims=True) * noise
    embeddings = TokenEmbeddings(np.concatenate([TABLE[:150], alike]).astype(np.float32), 1e4)
    reviews = [np.arange(at, at + 30, dtype=np.int32) for at in range(0, 300, 30)]
    prototypes = clusters.cluster(reviews[:5], embeddings, 0.999, 1000)
    chosen, told = search_for(prototypes, embeddings, [*reviews[:5] * 40, *reviews[5:]])
    queries = embeddings.of(np.concatenate([keys_of(review) for review in reviews[5:]]))
    near = (queries @ embeddings.of(prototypes.keys).T).max(axis=1).tolist()
    found = np.concatenate([Finder(prototypes, embeddings, chosen).find(x)[1] for x in reviews[5:]])
    hits = [abs(a - b) < 1e-4 for a, b in zip(found.tolist(), near, strict=True) if b >= REUSED_FROM]
    assert 100 < len(hits) and told == pytest.approx(np.mean(hits)) and told >= index.LEAST_RECALL
    for nothing in ([], reviews[:5]):
        assert search_for(prototypes, embeddings, nothing) == (index.LADDER[-1], 1.0)


def test_recall_counts_only_what_is_near_enough() -> None:
    found, wanted = np.array([0.95, 0.2, -1, 0.9], np.float32), np.array([0.95, 0.99, 0.5, 0.97], np.float32)
    assert index.recall(found, wanted, 0.9) == pytest.approx(1 / 3)
    assert index.recall(found, wanted, 0.9, np.array([6, 1, 5, 1])) == pytest.approx(6 / 8)
    assert index.recall(found, wanted, 0.999) == 1


def test_clusters_are_greedy_leaders_of_frequent_keys() -> None:
    reviews = like_words(1, 60)
    found = clusters.cluster(reviews, EMBEDDINGS, 0.95, 10_000)
    keys, counts = np.unique(np.concatenate([keys_of(x) for x in reviews]), return_counts=True)
    vectors = EMBEDDINGS.of(keys)
    left = dict.fromkeys(np.argsort(-counts, kind="stable").tolist())
    expected = {}
    while left:
        leader = next(iter(left))
        members = [at for at in left if at == leader or vectors[at] @ vectors[leader] >= 0.95]
        centre = (vectors[members] * counts[members][:, None]).sum(axis=0)
        nearest = max(members, key=lambda at: (round(float(vectors[at] @ centre), 4), -at))
        expected[int(keys[nearest])] = int(counts[members].sum())
        for at in members:
            del left[at]
    assert dict(zip(found.keys.tolist(), found.members.tolist(), strict=True)) == expected
    assert found.members.sum() == sum(map(len, reviews))
    for key, review, place in zip(found.keys, found.reviews, found.places, strict=True):
        assert keys_of(reviews[review])[place] == key, "a prototype is a real token"
    order = found.reviews * 1000 + found.places
    assert (np.diff(order) > 0).all(), "prototypes stand in the order of the corpus"
    few = clusters.cluster(reviews, EMBEDDINGS, 0.95, 40)
    assert sorted(few.members, reverse=True) == sorted(found.members, reverse=True)[:40]


def test_coverage_is_the_share_of_held_out_tokens_with_a_near_prototype() -> None:
    found, held_out = clusters.cluster(like_words(1, 60), EMBEDDINGS, 0.95, 500), like_words(2, 20)
    told = clusters.coverage(found, EMBEDDINGS, held_out, [50, 5, 500])
    queries = EMBEDDINGS.of(np.concatenate([keys_of(x) for x in held_out]))
    for cover in told:
        best = (queries @ EMBEDDINGS.of(found.keys[found.largest()[: cover.size]]).T).max(axis=1)
        shares = [(best > least - 1e-4).mean() for least in (0.99, 0.9)]
        assert (cover.at_99, cover.at_90) == pytest.approx(shares)
    assert [cover.size for cover in told] == [5, 50, 500]
    assert told[0].at_99 < told[1].at_99 < told[2].at_99 < 1
    assert clusters.coverage(found, EMBEDDINGS, [], [5]) == [], "nothing was held out to be covered"


FOUND = clusters.cluster(like_words(1, 60), EMBEDDINGS, 0.95, 200)
FINDER = Finder(FOUND, EMBEDDINGS, index.LADDER[2])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=100))
def test_what_is_found_is_that_near_and_what_is_the_same_is_found(tokens: list[int]) -> None:
    review = np.array(tokens, np.int32)
    numbers, cosines = FINDER.find(review)
    assert numbers.shape == cosines.shape == review.shape
    vectors = EMBEDDINGS.of(FOUND.keys)
    wanted = by_definition(review)
    for at, (number, cosine) in enumerate(zip(numbers.tolist(), cosines.tolist(), strict=True)):
        pair = np.concatenate([wanted[at].real, wanted[at].imag])
        best = float((vectors @ pair).max())
        assert cosine <= best + 1e-4, "nothing is nearer than the nearest"
        if number >= 0:
            assert float(vectors[number] @ pair) == pytest.approx(cosine, abs=1e-4)
        if keys_of(review)[at] in FOUND.keys:
            assert FOUND.keys[number] == keys_of(review)[at] and cosine == pytest.approx(1)


def test_writers_are_held_out_as_often_as_asked() -> None:
    held_out = [is_held_out(f"u{n}", 0.2) for n in range(4000)]
    assert sum(held_out) == pytest.approx(800, abs=100)
    assert not is_held_out("u1", 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Int32]]:
    reviews = [RNG.integers(3, 40, length).astype(np.int32) for length in (5, 40, 1, 12)]
    out = tmp_path_factory.mktemp("made") / "library"
    steps: list[int] = []
    report = build(
        out,
        PARAMS,
        CFG,
        "r1",
        PREFIX,
        Corpus(reviews, reviews[:1]),
        lambda done, *_: steps.append(done),
        most=1000,
    )
    assert steps[0] == 0 and steps[-1] == report["prototypes"]
    assert report["coverage"][-1]["at_99"] == 1, "what it is made of is covered"
    assert report["recall"] == 1
    return out, reviews


WANTED = identity("r1", "float32", (2, 1, 8), PREFIX)


def test_keys_and_values_are_those_of_the_own_review(made: tuple[Path, list[Int32]]) -> None:
    """Keys as before rope: those of a numpy decoder at their place, rotated back."""
    out, reviews = made
    library = LibraryFolder(out, WANTED)
    dense = Dense(CFG, PARAMS)
    kv = np.asarray(library.kv).view(np.float32)
    for number, (review, place) in enumerate(
        zip(library.prototypes.reviews.tolist(), library.prototypes.places.tolist(), strict=True)
    ):
        tokens = np.concatenate([PREFIX, reviews[review]])
        at, positions = len(PREFIX) + place, np.arange(len(tokens))
        of_layers = dense.run(tokens, positions, np.tril(np.ones((len(tokens), len(tokens)), bool)))
        for layer, (k, v) in enumerate(of_layers):
            np.testing.assert_allclose(
                kv[number, layer, 0], dense._rotate(k, -positions)[at], rtol=1e-5, atol=5e-5
            )
            np.testing.assert_allclose(kv[number, layer, 1], v[at], rtol=1e-5, atol=5e-5)


def test_a_library_of_something_else_or_cut_short_is_refused(
    made: tuple[Path, list[Int32]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="jgr kv library MODEL --out="):
        LibraryFolder(tmp_path / "none", WANTED)
    with pytest.raises(UserError, match="of another model"):
        LibraryFolder(made[0], identity("r2", "float32", (2, 1, 8), PREFIX))
    with pytest.raises(UserError, match=r"another prompt\.template"):
        LibraryFolder(made[0], identity("r1", "float32", (2, 1, 8), PREFIX[:1]))
    for name in (folder.KV, folder.RECORDS, folder.ABOUT):
        copy = tmp_path / name
        shutil.copytree(made[0], copy)
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=name):
            LibraryFolder(copy, WANTED)
    (copy / folder.ABOUT).write_bytes(whole.replace(b'"prototypes": ', b'"prototypes": 1'))
    with pytest.raises(UserError, match="are not those of"):
        LibraryFolder(copy, WANTED)


@pytest.mark.parametrize("name", [folder.RECORDS, folder.KV])
def test_a_library_with_one_byte_that_changed_is_refused(
    made: tuple[Path, list[Int32]], tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made[0], copy)
    LibraryFolder(copy, WANTED)
    changed = bytearray((copy / name).read_bytes())
    changed[-1] ^= 1
    (copy / name).write_bytes(changed)
    with pytest.raises(UserError, match=f"{name} is damaged; build it again with jgr kv library"):
        LibraryFolder(copy, WANTED)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"prototypes.npy": 1}'])
def test_a_library_without_the_sums_of_its_files_is_refused(
    made: tuple[Path, list[Int32]], tmp_path: Path, text: str | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made[0], copy)
    (copy / "sums.json").unlink(missing_ok=True)
    if text is not None:
        (copy / "sums.json").write_text(text)
    with pytest.raises(UserError, match=r"sums\.json: (cannot be read|is not what jgr kv library writes)"):
        LibraryFolder(copy, WANTED)


class Ended(Exception):
    """A builder that is stopped."""


def made_of(
    out: Path, reviews: list[Int32], show: Callable[[int, int, str], None], most: int = 60
) -> dict[str, Any]:
    return build(out, PARAMS, CFG, "r1", PREFIX, Corpus(reviews, reviews[:1]), show, most=most)


def show_nothing(done: int, total: int, label: str) -> None:
    pass


def ended_at(step: int) -> Callable[[int, int, str], None]:
    """Stops a builder as soon as it tells its progress for the step-th time."""
    left = iter(range(step))

    def show(done: int, total: int, label: str) -> None:
        if next(left, None) is None:
            raise Ended

    return show


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


MANY = [np.random.default_rng(n).integers(3, 40, 5 + 5 * n).astype(np.int32) for n in range(12)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a library that was built without an end."""
    out = tmp_path_factory.mktemp("whole") / "library"
    report = made_of(out, MANY, show_nothing)
    assert report["new"] == report["prototypes"] == 60
    assert [path.name for path in out.parent.iterdir()] == ["library"]
    return contents(out)


@pytest.mark.parametrize("kept", [1, 2, 16])
def test_a_build_that_was_ended_anywhere_goes_on_to_the_same_bytes(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Whatever the file of keys and values has where a batch is not done."""
    monkeypatch.setattr("jgr.library.build._KEPT", kept)
    for step in range(2):
        out = tmp_path / str(step)
        for steps in (step, 1):  # the second builder is ended too
            with pytest.raises(Ended):
                made_of(out, MANY, ended_at(steps))
        assert not out.exists(), "nothing is there until it is whole"
        report = made_of(out, MANY, show_nothing)
        assert contents(out) == whole
        assert kept > 1 or report["new"] < 60, "what was done is not done again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.library.test_library import MANY, made_of

def show(done, total, label):
    if done > 20:
        os.kill(os.getpid(), signal.SIGKILL)

made_of(Path(sys.argv[1]), MANY, show)
"""


def test_a_builder_that_is_killed_leaves_what_the_next_one_goes_on_from(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "library"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".library.partial"]
    made_of(out, MANY, show_nothing)
    assert contents(out) == whole


def test_a_builder_that_is_ended_before_the_keys_and_values_goes_on(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file that comes before them: the disk is full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "library"
    for name in ("build.write_records", "build.write_about", "building.os.posix_fallocate"):
        with monkeypatch.context() as patched:
            patched.setattr(f"jgr.library.{name}", full)
            with pytest.raises(UserError, match="disk is full; make room and start again"):
                made_of(out, MANY, show_nothing)
    made_of(out, MANY, show_nothing)
    assert contents(out) == whole


def test_a_builder_that_was_killed_before_its_work_folder_went_is_in_nobodys_way(
    whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Ended

    out = tmp_path / "library"
    with monkeypatch.context() as patched:
        patched.setattr("jgr.library.building.shutil.rmtree", killed)
        with pytest.raises(Ended):
            made_of(out, MANY, show_nothing)
    assert contents(out) == whole
    shutil.rmtree(out)
    assert [path.name for path in tmp_path.iterdir()] == [".library.partial"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("jgr.library.building.os.posix_fallocate", full)
        with pytest.raises(UserError, match="disk is full"):
            made_of(out, MANY, show_nothing)
    made_of(out, MANY, show_nothing)
    assert contents(out) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["library"]


def test_two_builders_do_not_work_at_one_library(tmp_path: Path) -> None:
    out = tmp_path / "library"

    def other(done: int, total: int, label: str) -> None:
        if not done:
            with pytest.raises(UserError, match="another jgr kv library is at work there"):
                made_of(out, MANY, show_nothing)

    made_of(out, MANY, other)
    with pytest.raises(UserError, match="is there already"):
        made_of(out, MANY, show_nothing)


@pytest.mark.parametrize("name", [".", "/", "..", "new/.."])
def test_a_place_that_is_no_new_folder_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is there already"):
        building.require_free(Path(name))
    with pytest.raises(UserError, match="is there already"):
        made_of(Path(name), MANY, show_nothing)
    assert not list(tmp_path.iterdir())


def test_lines_without_a_writer_are_of_a_writer_each(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"user_id": null, "text": "word {n}"}}\n' for n in range(400)))
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "<unk>": 1}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    found = read_corpus(texts, Tokenizer(inner), 8, 0.25)
    assert len(found.reviews) + len(found.held_out) == 400
    assert len(found.held_out) == pytest.approx(100, abs=30)


def test_an_unfinished_library_of_something_else_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "library"
    with pytest.raises(Ended):
        made_of(out, MANY, ended_at(1))
    for reviews, most in ((MANY, 59), (MANY[1:], 60), ([np.concatenate(MANY)], 60)):
        with pytest.raises(UserError, match="other texts or other settings that was not finished"):
            made_of(out, reviews, show_nothing, most)
    with pytest.raises(UserError, match="no token"):
        made_of(tmp_path / "b", [], show_nothing)
    assert [path.name for path in tmp_path.iterdir()] == [".library.partial"]


def test_reviews_are_computed_once_whatever_stands_after_the_last_prototype() -> None:
    reviews = [RNG.integers(3, 40, 50).astype(np.int32) for _ in range(6)]
    few = clusters.Prototypes(*(np.array(x) for x in ([5, 6, 7], [1, 1, 1], [1, 1, 4], [2, 9, 0])))
    found = [_batch_kv(PARAMS, CFG, PREFIX, reviews, few, batch) for batch in _batches(len(PREFIX), few)]
    assert sorted(np.concatenate([numbers for numbers, _ in found]).tolist()) == [0, 1, 2]
    assert sum(len(values) for _, values in found) == 3
