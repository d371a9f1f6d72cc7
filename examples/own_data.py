# SPDX-License-Identifier: Apache-2.0
"""From a file of ratings to recommendations: prepare it, train a generator and a scorer, evaluate them, ask them.

    python examples/own_data.py                        # ratings that this script makes up
    python examples/own_data.py --csv=my_ratings.csv   # yours: user_id,item_id,rating,timestamp

Each step is a command that is printed before it runs, so that you can repeat it with other values. Everything is
written into the folder runs/example. It takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import csv
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jgr

# The command `jgr` of this Python, wherever its script lies.
JGR = [sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())"]

# The steps, in a folder that holds raw/interactions.csv. docs/quickstart/own_data.md explains them one by one.
PREPARE = "jgr prepare --source=generic --raw={out}/raw --out={out}/data"
TREE_IDS = "jgr ids --data={out}/data --method=balanced --sizes=16,16 --collisions=reassign"
ITEM_IDS = "jgr ids --data={out}/data --name=items --method=item"
TRAIN_GENERATOR = (
    "jgr train --config=shop --set model.name=generator --set data.kind=prepared --set data.path={out}/data "
    "--set train.out={out}/generator --set train.layers=1 --set train.steps={steps}"
)
TRAIN_SCORER = (
    "jgr train --set model.name=scorer --set data.kind=prepared --set data.path={out}/data --set data.catalog=items "
    "--set train.out={out}/scorer --set train.model=stu --set feedback.tasks=rating_from_4 --set train.dropout=0 "
    "--set train.layers=1 --set train.batch=64 --set train.steps={steps}"
)
EVALUATE_GENERATOR = "jgr evaluate {out}/generator --exclude_history --k=10"
EVALUATE_SCORER = "jgr evaluate {out}/scorer --feedback --set executors.sizes=32"


def make_ratings(path: Path, users: int) -> None:
    """Write ratings of people who follow series: whoever has seen a part mostly goes on with the next one."""
    draw = random.Random(0)
    series, parts = 15, 8
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "item_id", "rating", "timestamp"])
        for user in range(users):
            liked = set(draw.sample(range(series), 4))  # the series that this user gives many stars
            which, part = draw.randrange(series), 0
            for step in range(draw.randint(8, 16)):
                if (
                    part == parts or draw.random() < 0.25
                ):  # at its end, or bored: another series, mostly a liked one
                    which = draw.choice(sorted(liked)) if draw.random() < 0.7 else draw.randrange(series)
                    part = draw.randrange(parts // 2)
                stars = min(5, max(1, round(draw.gauss(4.3 if which in liked else 2.3, 0.8))))
                rows.writerow([f"u{user}", f"s{which}p{part}", stars, 1_700_000_000 + 86_400 * step + user])
                part += 1


def run(command: str, **values: object) -> None:
    """Show a command, and run it; the script ends where it fails."""
    line = command.format(**values)
    print(f"\n$ {line}", flush=True)
    subprocess.run([*JGR, *shlex.split(line)[1:]], check=True)


def ask(out: Path) -> None:
    """Recommend with the generator, and let the scorer put what it found into the user's order."""
    history = ["s3p0", "s3p1", "s3p2"]
    with open(out / "raw" / "interactions.csv", newline="") as file:
        known = [row["item_id"] for row in csv.DictReader(file)]
    if not set(history) <= set(known):  # a file of yours: its first three items
        history = list(dict.fromkeys(known))[:3]
    # The server's engine in this process. It compiles when it is made, here for one request at a time; then it answers
    # from any thread. A setting is written as behind --set; kinds are those of the calls that will be made.
    with jgr.Engine(out / "generator", ["profiles.batch=1"], kinds=["recommend"]) as generator:
        found = generator.recommend(history, top_k=5, exclude_history=True)
    print(f"\nafter {', '.join(history)} the generator recommends:")
    for item in found.items:
        print(f"  {item.rank}. {item.item_id:<6} {item.score:7.3f}")
    # A scorer reads more of a user: when each item was used, and what was done with it, a bit for each action of the
    # dataset's manifest.json. Here nothing is said of the actions. One compiled size is enough for few candidates.
    with jgr.Engine(out / "scorer", ["executors.sizes=32"]) as scorer:
        times = [1_700_000_000 + 86_400 * step for step in range(len(history))]
        timed = {"history_times": times, "time": times[-1] + 86_400} if scorer.info.timed else {}
        ranked = scorer.rank(history, [item.item_id for item in found.items], **timed)
    print("the scorer's probability that they get four stars or more:")
    for item in ranked.items:
        print(f"  {item.rank}. {item.item_id:<6} {item.score:7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="From a file of ratings to recommendations.")
    parser.add_argument("--csv", type=Path, help="your ratings: user_id,item_id,rating,timestamp")
    parser.add_argument("--out", type=Path, default=Path("runs/example"), help="the folder to write")
    parser.add_argument("--users", type=int, default=600, help="users whose ratings are made up")
    parser.add_argument("--steps", type=int, default=150, help="training steps of each model")
    options = parser.parse_args()
    out = options.out
    if out.exists():
        raise SystemExit(f"{out} is there already: remove it, or give another --out")
    (out / "raw").mkdir(parents=True)
    if options.csv:
        shutil.copy(options.csv, out / "raw" / "interactions.csv")
    else:
        make_ratings(out / "raw" / "interactions.csv", options.users)
    run(PREPARE, out=out)
    run(TREE_IDS, out=out)
    run(ITEM_IDS, out=out)
    run(TRAIN_GENERATOR, out=out, steps=options.steps)
    run(TRAIN_SCORER, out=out, steps=options.steps)
    run(EVALUATE_GENERATOR, out=out)
    run(EVALUATE_SCORER, out=out)
    ask(out)


if __name__ == "__main__":
    main()
