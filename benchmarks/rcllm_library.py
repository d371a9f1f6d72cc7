# SPDX-License-Identifier: Apache-2.0
"""How much of what users write a library of prototypes covers (RCLLM-2, 3), against the size of its pool.

Real reviews: amazon-instruments-reviews, 5,050 of 1,381 users. Every fifth user is held out: neither the tokenizer nor
the prototypes see what they wrote, and coverage is the share of their tokens with a prototype at a cosine of at least
.99 and .9, by brute force. Intervals are bootstrapped over held-out users. The tokenizers are byte-level BPE, trained
here, of three sizes: the more words are one token, the fewer tokens are alike.

The embeddings are those of a decoder with random weights. So two tokens are alike where they are the same word in the
same 32 positions of a review, and in no other way: what training adds to that by words of like meaning is not measured
here. The paper has more than 93 % near 1, with about 100,000 prototypes from data sets a thousand times as large.

The search is measured on held-out tokens that are no prototype, since those are found without it: recall of brute force
where that finds a cosine of at least .9, with the settings that are chosen and with the spec's four tables of 18 bits;
and on prototypes' vectors with noise, at a cosine of about .95, which is what such settings are for. Where no held-out
token is near a prototype without being one, as with random weights, there is nothing to find and no claim.

    python -m benchmarks.rcllm_library [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.config import UserError
from jgr.files import read_lines
from jgr.library.build import REUSED_FROM, pool_sizes
from jgr.library.clusters import cluster, coverage
from jgr.library.corpus import is_held_out
from jgr.library.embeddings import TokenEmbeddings, keys_of
from jgr.library.index import LADDER, LshIndex, nearest_of_all, recall, tuned
from jgr.library.prototypes import Prototypes, Settings
from jgr.models import decoder, params
from jgr.prompt.tokens import Tokenizer

HELD_OUT = 0.2
REVIEW_TOKENS = 512
VOCABULARIES = (1024, 4096, 16384)
HIDDEN, THETA = 64, 1e6
COSINE = 0.95
KV_BYTES = 114_688
"""Bytes of a token's keys and values in a Qwen3-0.6B, in 16 bits."""
PAPER = 0.93
NOISE = 0.33
"""The length of the noise of a vector of length 1, for a cosine of .95."""
MOST_SEARCHED = 4096

Int32 = npt.NDArray[np.int32]


def texts() -> tuple[list[str], dict[str, list[str]]]:
    """The reviews of the users that are not held out, and of each held-out user."""
    path = Path(os.environ.get("JGR_DATA", "")) / "amazon-instruments-reviews" / "reviews.jsonl.gz"
    if not path.is_file():
        raise Missing(f"needs {path}: set JGR_DATA to the folder of the datasets")
    kept: list[str] = []
    held_out: dict[str, list[str]] = {}
    for _, line in read_lines(path, UserError):
        review = msgspec.json.decode(line)
        user, text = review["user_id"], review["text"]
        if is_held_out(user, HELD_OUT):
            held_out.setdefault(user, []).append(text)
        else:
            kept.append(text)
    return kept, held_out


def train_tokenizer(kept: Sequence[str], vocabulary: int) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<bos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(kept, trainer)
    return Tokenizer(inner)


def tokens_of(tokenizer: Tokenizer, some: Sequence[str]) -> list[Int32]:
    return [np.array(ids[:REVIEW_TOKENS], np.int32) for ids in tokenizer.encode_untrusted(some) if ids]


def measure(quick: bool, quiet: Quiet) -> Measured:
    kept, held_out = texts()
    rows: list[Row] = []
    for vocabulary in VOCABULARIES[:1] if quick else VOCABULARIES:
        rows += measured(kept[:500] if quick else kept, held_out, vocabulary)
        harness.note(f"{vocabulary} tokens")
    return Measured(claims(rows), rows)


def measured(kept: Sequence[str], held_out: dict[str, list[str]], vocabulary: int) -> Iterator[Row]:
    """A row for each size of the pool, and one for the search."""
    tokenizer = train_tokenizer(kept, vocabulary)
    cfg = decoder.DecoderConfig(
        "qwen3", tokenizer.vocab_size, HIDDEN, 1, 1, 1, HIDDEN, HIDDEN, THETA, 1e-6, True, 4096
    )
    table = np.asarray(params.initialize(decoder.spec(cfg), jax.random.key(0)).embed)
    embeddings = TokenEmbeddings(table, THETA)
    reviews = tokens_of(tokenizer, kept)
    of_users = [tokens_of(tokenizer, some) for some in held_out.values()]
    others = [review for user in of_users for review in user]
    found = cluster(reviews, embeddings, COSINE, 1 << 30)
    about = {
        "weights": "random",
        "vocabulary": tokenizer.vocab_size,
        "tokens": sum(map(len, reviews)),
        "held_out_tokens": sum(map(len, others)),
        "held_out_users": len(of_users),
    }
    sizes = pool_sizes(len(found.keys))
    for cover in coverage(found, embeddings, others, sizes):
        row: Row = {**about, "prototypes": cover.size, "megabytes": rounded(cover.size * KV_BYTES / 2**20)}
        row |= {"at_99": rounded(cover.at_99), "at_90": rounded(cover.at_90)}
        if cover.size == sizes[-1]:
            row["interval_at_99"] = interval(found, embeddings, of_users)
        yield row
    yield {**about, **search(found, embeddings, others)}


def interval(
    found: Prototypes, embeddings: TokenEmbeddings, of_users: Sequence[Sequence[Int32]]
) -> list[float]:
    """95 % interval of the share at .99 with all prototypes, bootstrapped over users."""
    keys = [np.concatenate([keys_of(review) for review in user]) for user in of_users if user]
    unique, back = np.unique(np.concatenate(keys), return_inverse=True)
    near = nearest_of_all(embeddings.of(found.keys), embeddings.of(unique))[1][back] >= 0.99 - 1e-5
    ends = np.cumsum([len(each) for each in keys])
    covered = np.diff(np.concatenate([[0], np.cumsum(near)[ends - 1]]))
    counts = np.diff(np.concatenate([[0], ends]))
    drawn = np.random.default_rng(0).integers(0, len(keys), (2000, len(keys)))
    shares = covered[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(shares, (2.5, 97.5))
    return [rounded(float(low)), rounded(float(high))]


def search(found: Prototypes, embeddings: TokenEmbeddings, others: Sequence[Int32]) -> Row:
    """The settings that are chosen for held-out tokens that need a search and have something to find, if there are
    any, and for vectors at about .95, with recall beside the spec's."""
    vectors = embeddings.of(found.keys)
    keys = np.concatenate([keys_of(review) for review in others])
    unique, counts = np.unique(keys[~np.isin(keys, found.keys)], return_counts=True)
    some = np.argsort(-counts, kind="stable")[:MOST_SEARCHED]
    rng = np.random.default_rng(0)
    noisy = vectors[rng.integers(0, len(vectors), 1000)]
    noisy = noisy + rng.normal(size=noisy.shape).astype(np.float32) * NOISE / np.sqrt(noisy.shape[1])
    noisy /= np.linalg.norm(noisy, axis=1, keepdims=True)
    row: Row = {}
    for name, queries, weights in (
        ("held_out", embeddings.of(unique[some]), counts[some]),
        ("noisy", noisy, np.ones(len(noisy), np.int64)),
    ):
        wanted = nearest_of_all(vectors, queries)[1]
        if not (wanted >= REUSED_FROM).any():
            continue
        settings, share = tuned(vectors, queries, REUSED_FROM, weights)
        spec = recall(LshIndex(vectors, LADDER[0]).nearest(queries)[1], wanted, REUSED_FROM, weights)
        row[name] = {
            "recall": rounded(share),
            "recall_of_4_tables_of_18_bits": rounded(spec),
            **_shown(settings),
        }
    return row


def _shown(settings: Settings) -> dict[str, Any]:
    return {"tables": settings.tables, "bits": settings.bits, "flips": settings.flips}


def claims(rows: Sequence[Row]) -> list[Claim]:
    found: list[Claim] = []
    for row in rows:
        vocabulary = row["vocabulary"]
        if "interval_at_99" in row:
            low, high = row["interval_at_99"]
            name = f"library-coverage-of-held-out-reviews-{vocabulary}-words"
            found.append(Claim(name, row["at_99"], "", "higher", PAPER, interval=(low, high)))
        for name in (each for each in ("held_out", "noisy") if each in row):
            id = f"library-search-finds-of-{name.replace('_', '-')}-tokens-{vocabulary}-words"
            found.append(Claim(id, row[name]["recall"], "", "higher", 0.95))
    return found


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Coverage against the size of the pool, a line for each tokenizer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for vocabulary in dict.fromkeys(row["vocabulary"] for row in rows):
        own = [row for row in rows if row["vocabulary"] == vocabulary and "prototypes" in row]
        sizes = [row["prototypes"] for row in own]
        (line,) = axes.plot(sizes, [row["at_99"] for row in own], marker="o", label=f"{vocabulary:,} words")
        axes.plot(sizes, [row["at_90"] for row in own], "--", color=line.get_color(), linewidth=0.8)
    axes.axhline(PAPER, color="grey", linewidth=0.8, label="paper: 93 %")
    axes.set(xscale="log", ylim=(0, 1), xlabel="prototypes", ylabel="share of held-out tokens")
    axes.set_title(
        "Tokens of reviews with a prototype at cosine .99 (dashed: .9); random weights", fontsize=10
    )
    axes.legend(loc="lower right", title="tokenizer of")
    figure.savefig(path)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_library",
            measure=measure,
            packages=["jax", "numpy", "faiss-cpu", "tokenizers"],
            sources=[Path(__file__)],
            plot=plot,
        )
    )
