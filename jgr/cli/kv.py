# SPDX-License-Identifier: Apache-2.0
"""`jgr kv build FOLDER --out=DIR`: computes the keys and values of all items of a model's catalog ahead.

The replicas of `jgr cluster --set=fleet.kv=DIR` map the folder, and need not compute them. A build that was ended goes
on where it was; after a change of the catalog only the items that are new, or have other texts, are computed. The last
line of stdout is one JSON document that says what is there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import Config, UserError

HELP = "build: compute the keys and values of a catalog's items ahead, for jgr cluster"


def define_flags() -> None:
    flags.DEFINE_string("out", None, "folder for the keys and values; one that is there is completed")


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("jgr kv build FOLDER --out=DIR")
        return 0
    name, *rest = argv
    if name != "build":
        raise UserError(f"there is no 'jgr kv {name}'; there is build")
    config = console.load_folder(flags.FLAGS, rest)
    if not flags.FLAGS.out:
        raise UserError("--out: name the folder for the keys and values")
    report = asyncio.run(build(config, Path(flags.FLAGS.out)))
    print(f"{flags.FLAGS.out}: {report['items']} items, of which {report['new']} are new")
    print(json.dumps(report))
    return 0


def _alone(config: Config) -> Config:
    """The configuration for the build: as the replicas', but for what concerns other requests and other nodes."""
    cache = replace(config.cache, shadow=0.0)
    return replace(config, cache=cache, fleet=replace(config.fleet, items="none"))


async def build(config: Config, out: Path) -> dict[str, int]:
    """Build; returns how many items are there, and how many are new. Raises UserError for what cannot be built."""
    from jgr.serving.decoders.item_blocks import build
    from jgr.serving.decoders.serve import ServedDecoder
    from jgr.serving.policies.prefix_choice import KEEP_ITEMS
    from jgr.serving.versions.loading import load_any

    if config.cache.policy not in KEEP_ITEMS or config.rank.method == "likelihood":
        raise UserError(
            "jgr kv build: the model keeps no items: it takes rank.method=item_token or item_probe, and cache.policy="
            f"{' or '.join(KEEP_ITEMS)}"
        )
    engine = load_any(_alone(config))
    if not isinstance(engine.served, ServedDecoder):
        raise UserError("jgr kv build: a scorer keeps no items")
    with console.progress_bar("compiling") as show:
        await engine.start(show)
    try:
        with console.progress_bar("items") as show:
            items, new = await build(engine, out, show)
    finally:
        await engine.drain(0.0)
        engine.join(5.0)
    return {"items": items, "new": new}
