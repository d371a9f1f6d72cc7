# SPDX-License-Identifier: Apache-2.0
"""Recomputes one row of a quality table from a server's raw answers, with nothing of jgr: the standard library alone.

    python -m tools.recheck ask URL --raw=FILE --answers=FILE [--model=NAME] [--exclude_history] [--limit=N]
    python -m tools.recheck count --answers=FILE --raw=FILE [--result=FILE --of=NAME --method=jgr]

`ask` reads the raw data as it was published, asks a running server (`jgr serve`) for ten items after every test
history, and writes each answer's body as a line of its own, untouched. `count` reads these and the raw data again and
prints HR and NDCG at 5 and 10 and MRR at 10; with a result of benchmarks/results it exits with 1 where a figure of that
row differs.

FILE of --raw, gzip or plain: `user item item ...` a line, oldest first, whose last item is the test target; or
MiniOneRec's test.inter with columns of user, history and target.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOP_K = 10
THREADS = 8
TOLERANCE = 5e-7
"""Between two means of the same numbers, which results hold in full."""

Example = tuple[list[str], str]
"""History, oldest first, and target."""


def examples(path: Path, limit: int | None = None) -> list[Example]:
    """The test examples of a raw file in its order."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with opened as file:
        lines = file.read().splitlines()
    if lines[0].count("\t") == 2:
        split = [line.split("\t") for line in lines[1:]]
        found = [(history.split(), target) for _, history, target in split]
    else:
        found = [(line.split()[1:-1], line.split()[-1]) for line in lines]
    return found[:limit]


def fetch(url: str, body: Any = None) -> bytes:
    """The body of an answer; an HTTP error is raised as it is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def ask(url: str, asked: Sequence[Example], model: str, exclude: bool) -> Iterator[bytes]:
    """The answers' bodies, in the examples' order. model: "" for the server's first."""
    models = json.loads(fetch(f"{url}/v1/models"))["data"]
    info = next(one for one in models if model in ("", one["id"]))
    ranks = info["max_beam_width"] == 0

    def one(example: Example) -> bytes:
        history = example[0] if exclude else example[0][-info["max_history"] :]
        body = {"model": info["id"], "history": history, "top_k": TOP_K, "exclude_history": exclude}
        return fetch(
            f"{url}/v1/{'rank' if ranks else 'recommend'}", body | ({"candidates": "all"} if ranks else {})
        )

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(one, asked)


def place(answer: bytes | str, target: str) -> int:
    """Where the target stands in an answer, 1 for the first; 0 if it does not."""
    items = [item["item_id"] for item in json.loads(answer)["items"]][:TOP_K]
    if len(set(items)) != len(items):
        raise ValueError(f"an item stands twice in an answer: {items}")
    return items.index(target) + 1 if target in items else 0


def figures(places: Sequence[int]) -> dict[str, float]:
    """The means over all examples, each of which has one target: HR, NDCG = 1 / log2(place + 1), MRR = 1 / place."""
    count = len(places)
    found = {}
    for k in (5, 10):
        within = [at for at in places if 0 < at <= k]
        found[f"hr@{k}"] = len(within) / count
        found[f"ndcg@{k}"] = math.fsum(1 / math.log2(at + 1) for at in within) / count
    found["mrr@10"] = math.fsum(1 / at for at in places if at) / count
    return found


def row_of(result: Path, of: str, method: str) -> dict[str, Any]:
    """The row of a result's file."""
    rows = json.loads(result.read_text())["rows"]
    return next(row for row in rows if row.get("of") == of and row.get("method") == method)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A row of a quality table from raw answers.")
    commands = parser.add_subparsers(dest="command", required=True)
    asking, counting = commands.add_parser("ask"), commands.add_parser("count")
    for one in (asking, counting):
        one.add_argument("--raw", type=Path, required=True)
        one.add_argument("--answers", type=Path, required=True)
    asking.add_argument("url")
    asking.add_argument("--model", default="")
    asking.add_argument("--exclude_history", action="store_true")
    asking.add_argument("--limit", type=int)
    counting.add_argument("--result", type=Path)
    counting.add_argument("--of", default="")
    counting.add_argument("--method", default="jgr")
    given = parser.parse_args(argv)
    if given.command == "ask":
        asked = examples(given.raw, given.limit)
        with given.answers.open("wb") as file:
            for answer in ask(given.url.rstrip("/"), asked, given.model, given.exclude_history):
                file.write(answer.strip() + b"\n")
        return 0
    answers = given.answers.read_text().splitlines()
    asked = examples(given.raw, len(answers))
    found = figures([place(answer, target) for answer, (_, target) in zip(answers, asked, strict=True)])
    print(json.dumps({"examples": len(asked), **found}))
    if given.result is None:
        return 0
    told = row_of(given.result, given.of, given.method)
    wrong = {
        name: (value, told[name]) for name, value in found.items() if abs(value - told[name]) > TOLERANCE
    }
    print("equal to the result's row" if not wrong else f"differs, as (counted, told): {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
