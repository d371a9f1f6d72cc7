# SPDX-License-Identifier: Apache-2.0
"""Items over K nodes by who asks for them together (RCLLM-7): what is cut, and what a request finds on its best node.

Counted, not timed. A request is 20 candidates that a retriever names for a history: item-kNN over the history's last
ten items, fitted on the training sequences (jgr.evaluation.baselines.ItemKNN). Histories of training requests are
beginnings of training sequences; those of test requests end before each test target. The graph is made of training
requests alone.

- cut: the edges between parts, by METIS, by the NumPy partition and by hash, on graphs with planted communities, whose
  own cut is known, and on the real ones.
- hit share: of its candidates, those that a test request finds on the node which has the most of them, in the mean.
  Beside it stand the hash of the row, and a partition of the test requests' own graph, which no placement can know.

A node has n / K items. Where that is not many times a request's candidates, nothing can bring them to one node: the
paper's 85 to 88 % at K = 40 are of 778,000 items. So that is the bar on planted communities of 20 times the candidates.

    pip install 'jgr[placement]'
    JGR_DATA=FOLDER python -m benchmarks.rcllm_placement    FOLDER holds ml-1m and amazon-industrial-minionerec
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import run
from jgr.config import DataConfig
from jgr.data.datasets import Dataset, load_dataset
from jgr.data.interactions import Ragged
from jgr.evaluation.baselines import ItemKNN
from jgr.placement import partition as partitions
from jgr.placement import similarity as similarities
from jgr.placement.items import Items, Workers, hash_items
from jgr.placement.partition import By, cut, imbalance_of, partition
from jgr.placement.similarity import best_share, graph, homes, hottest, similarity

Int32 = npt.NDArray[np.int32]

CANDIDATES, LAST = 20, 10
PREFIXES = 4
"""Training requests of a user, from beginnings of its sequence."""
NODES = (1, 2, 4, 8, 20, 40, 80, 100)
BAR = 40
WAYS: tuple[By, ...] = ("metis", "numpy")
RANDOM, ROOM = 3.0, 1.1
"""The cut is to be so many times below random, and at most so many times the planted one."""


class World(NamedTuple):
    """Items of these tokens, [n], and requests for them, [c] rows each."""

    name: str
    tokens: Int32
    train: list[Int32]
    test: list[Int32]


def planted(parts: int, size: int, train: int, test: int) -> tuple[World, Int32]:
    """Requests of which nine tenths are for items of one community, and the community of each item.

    All communities are asked for equally often: one that is asked for more than a part may be has no planted cut to be
    compared with, since no balanced partition is that.
    """
    rng = np.random.default_rng(parts)
    n = parts * size
    of = rng.permutation(np.repeat(np.arange(parts), size)).astype(np.int32)
    members = np.argsort(of, kind="stable").reshape(parts, size)

    def one(request: int) -> Int32:
        inside = rng.binomial(CANDIDATES, 0.9)
        own = rng.choice(members[request % parts], inside, replace=False)
        return np.unique(np.append(own, rng.integers(0, n, CANDIDATES - inside))).astype(np.int32)

    tokens = rng.integers(40, 120, n).astype(np.int32)
    asked = [one(request) for request in range(train + test)]
    return World(f"planted-{parts}", tokens, asked[:train], asked[train:]), of


def loaded(name: str, users: int | None) -> World:
    """A real dataset with what item-kNN names."""
    dataset = _dataset(name)
    sequences, n = dataset.interactions.sequences, dataset.catalog.n_items
    examples = dataset.interactions.test.select(slice(users))
    retriever, rng = ItemKNN(sequences, n), np.random.default_rng(0)
    beginnings = [
        rows[max(0, end - LAST) : end]
        for rows in list(sequences)[:users]
        for end in np.unique(rng.integers(1, len(rows) + 1, PREFIXES) if len(rows) else [])
    ]
    lasts = [rows[-LAST:] for rows in examples.histories]
    train, test = (
        retriever.top_k(Ragged.of(some), CANDIDATES, exclude_seen=True) for some in (beginnings, lasts)
    )
    words = [len(str((meta or {}).get("title", "")).split()) for meta in dataset.catalog.metadata]
    return World(name, np.array(words, np.int32) + 4, list(train), list(test))


def _dataset(name: str) -> Dataset:
    folder = {"ml1m": "ml-1m", "industrial": "amazon-industrial-minionerec"}[name]
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / folder
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {folder} in the folder that JGR_DATA names")
    if name == "industrial":
        return load_dataset(DataConfig(kind="minionerec", path=str(raw)))
    data = harness.ROOT / "runs/data" / "rules_movielens-1m-sasrec"
    if not (data / "catalog.jsonl").exists():
        run("prepare", "--source=movielens-1m-sasrec", f"--raw={raw}", f"--out={data}")
        run("ids", f"--data={data}", "--method=item")
    return load_dataset(DataConfig(kind="prepared", path=str(data)))


def cut_rows(world: World, parts: int, own: Int32 | None = None) -> Iterator[Row]:
    """The cut by each way beside that of the hash, and of the planted communities where they are given."""
    items = _items(world)
    edges = graph(len(items), world.train, hottest(items))
    total = edges.sum() / 2
    loads = np.stack([items.share, items.tokens], axis=1)
    random = cut(edges, (np.arange(len(items)) % parts).astype(np.int32))
    for by in WAYS:
        part = partition(edges, loads, parts, by)
        found: Row = {
            "of": world.name, "items": len(items), "nodes": parts, "cut_by": by,
            "share_of_edges_cut": harness.rounded(cut(edges, part) / total),
            "random_over_cut": harness.rounded(random / max(cut(edges, part), 1e-9)),
            "imbalance_accesses_tokens": [harness.rounded(x) for x in imbalance_of(loads, part, parts)],
        }  # fmt: skip
        if own is not None:
            found["cut_over_planted"] = harness.rounded(cut(edges, part) / cut(edges, own))
        yield found


def hit_row(world: World, nodes: int) -> Row:
    """The share of its candidates that a test request finds on its best node."""
    items = _items(world)
    workers = Workers(nodes, int(items.room_bytes.sum()))
    shares: dict[str, float] = {"hash": best_share(hash_items(items, workers).held(), world.test)}
    for by in WAYS:
        at = homes(items, workers, world.train, by=by)
        shares[by] = best_share(similarity(items, workers, at).held(), world.test)
    at = homes(items, workers, world.test, by="metis")
    shares["knows"] = best_share(similarity(items, workers, at).held(), world.test)
    return {
        "of": world.name, "items": len(items), "nodes": nodes,
        "items_of_a_node_over_candidates": harness.rounded(len(items) / nodes / CANDIDATES),
        **{f"hit_share_{name}": harness.rounded(share) for name, share in shares.items()},
    }  # fmt: skip


def _items(world: World) -> Items:
    asked = np.bincount(np.concatenate(world.train), minlength=len(world.tokens))
    return Items(asked.astype(np.float64), world.tokens.astype(np.int64), 1)


def measure(quick: bool, quiet: Quiet) -> Measured:
    if find_spec("pymetis") is None:
        raise Missing("needs pymetis: pip install 'jgr[placement]'")
    users, nodes = (300, (1, 8, BAR)) if quick else (None, NODES)
    train, test = (4_000, 300) if quick else (30_000, 2_000)
    world, own = planted(BAR, 20 * CANDIDATES, train, test)
    cuts = list(cut_rows(world, BAR, own))
    hits = [hit_row(world, BAR)]
    about: list[Row] = [_about(world)]
    for name in ("industrial", "ml1m"):
        real = loaded(name, users)
        about.append(_about(real))
        for count in nodes:
            if count > 1:
                cuts += cut_rows(real, count)
            hits.append(hit_row(real, count))
    return Measured(claims(cuts, hits), [*about, *cuts, *hits])


def _about(world: World) -> Row:
    retriever = "none: drawn" if world.name.startswith("planted") else "item-kNN"
    counts = {"train_requests": len(world.train), "test_requests": len(world.test)}
    return {"about": world.name, "retriever": retriever, "candidates": CANDIDATES, **counts}


def claims(cuts: Sequence[Row], hits: Sequence[Row]) -> list[Claim]:
    found = []
    for row in cuts:
        if "cut_over_planted" in row:
            by = row["cut_by"]
            found += [
                Claim(
                    f"rcllm-placement-cut-below-random-{by}", row["random_over_cut"], "x", "higher", RANDOM
                ),
                Claim(f"rcllm-placement-cut-over-planted-{by}", row["cut_over_planted"], "x", "lower", ROOM),
            ]
    worst = max(max(row["imbalance_accesses_tokens"]) for row in cuts if "cut_over_planted" in row)
    found.append(Claim("rcllm-placement-imbalance-planted", worst, "", "lower", partitions.IMBALANCE))
    for row in hits:
        if row["nodes"] != BAR:
            continue
        for by in WAYS:
            share = row[f"hit_share_{by}"]
            if row["of"].startswith("planted"):
                found.append(Claim(f"rcllm-placement-hit-share-planted-{by}", share, "", "higher", 0.85))
            else:
                over = harness.rounded(share / row["hit_share_hash"])
                found.append(
                    Claim(f"rcllm-placement-hit-share-{row['of']}-{by}-over-hash", over, "x", "higher", 1.0)
                )
    return found


def plot(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """The hit share against the number of nodes, on the real graphs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    names = {"industrial": "Amazon Industrial", "ml1m": "MovieLens 1M"}
    styles = {
        "knows": ("a partition that knows the test requests", "C2", "--"), "metis": ("METIS, refined", "C0", "-"),
        "numpy": ("multilevel in NumPy", "C1", "-"), "hash": ("hash of the row", "C7", ":"),
    }  # fmt: skip
    for axes, (name, words) in zip(figure.subplots(1, 2, sharey=True), names.items(), strict=True):
        some = [row for row in rows if row.get("of") == name and "hit_share_hash" in row]
        for way, (label, color, style) in styles.items():
            shares = [row[f"hit_share_{way}"] for row in some]
            axes.plot([row["nodes"] for row in some], shares, style, color=color, marker=".", label=label)
        axes.set(title=words, xlabel="nodes", ylim=(0, 1.02), xscale="log")
        axes.set_xticks(list(NODES), [str(count) for count in NODES])
        axes.minorticks_off()
    figure.axes[0].set_ylabel(f"of {CANDIDATES} candidates on the best node")
    figure.axes[1].legend(fontsize="small")
    figure.savefig(picture)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="rcllm_placement",
            measure=measure,
            packages=("numpy", "pymetis", "scipy"),
            sources=(Path(__file__), Path(str(partitions.__file__)), Path(str(similarities.__file__))),
            plot=plot,
        )
    )
