# SPDX-License-Identifier: Apache-2.0
"""`jgr kv`: keys and values that are computed ahead. The last line of stdout is one JSON document that says what is
there.

`jgr kv build FOLDER --out=DIR`: those of all items of a model's catalog. The replicas of `jgr cluster
--set=fleet.kv=DIR` map the folder, and need not compute them. A build that was ended goes on where it was; after a
change of the catalog only the items that are new, or have other texts, are computed.

`jgr kv library FOLDER --texts=FILE --out=DIR`: a library of prototypes, of texts such as reviews (RCLLM-2..4), which
`jgr serve --set=cache.library=DIR` reads. Every so many users are held out, and the report says how much of their texts
the library covers, and smaller ones would. Nothing is at DIR until the library is whole; a build that was ended goes on
where it was, with the same bytes in the end.
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
from jgr.extras import require

HELP = "build: compute the keys and values of a catalog's items ahead; library: make prototypes of texts"


def define_flags() -> None:
    flags.DEFINE_string("out", None, "folder for the keys and values; build completes one that is there")
    flags.DEFINE_string("texts", None, "library: JSON lines with a text each, such as reviews; may be .gz")
    flags.DEFINE_string("text_field", "text", "library: the field of a line that has the text")
    flags.DEFINE_string(
        "user_field", "user_id", "library: the field of a line that names its writer, if it has one"
    )
    flags.DEFINE_integer("prototypes", 100_000, "library: the most prototypes that are kept", lower_bound=1)
    flags.DEFINE_float(
        "held_out",
        0.1,
        "library: share of the writers whose texts only measure it",
        lower_bound=0,
        upper_bound=0.9,
    )


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("jgr kv build FOLDER --out=DIR\njgr kv library FOLDER --texts=FILE --out=DIR")
        return 0
    name, *rest = argv
    if name not in ("build", "library"):
        raise UserError(f"there is no 'jgr kv {name}'; there are build and library")
    console.refuse_unused(
        name == "library", ("texts", "text_field", "user_field", "prototypes", "held_out"), "jgr kv library"
    )
    config = console.load_folder(flags.FLAGS, rest)
    if not flags.FLAGS.out:
        raise UserError("--out: name the folder for the keys and values")
    if name == "library":
        return _library(config)
    report = asyncio.run(build(config, Path(flags.FLAGS.out)))
    print(f"{flags.FLAGS.out}: {report['items']} items, of which {report['new']} are new")
    print(json.dumps(report))
    return 0


def _library(config: Config) -> int:
    require("library", "jgr kv library")
    from jgr.library.build import build
    from jgr.library.building import require_free
    from jgr.library.corpus import read_corpus
    from jgr.serving.decoders.library import library_model

    values = flags.FLAGS
    if not values.texts:
        raise UserError("--texts: name the file of texts")
    require_free(Path(values.out))
    model = library_model(config)
    texts = Path(values.texts)
    corpus = read_corpus(
        texts,
        model.tokenizer,
        config.prompt.review_tokens,
        values.held_out,
        values.text_field,
        values.user_field,
    )
    with console.progress_bar("prototypes") as show:
        report = build(
            Path(values.out),
            model.params,
            model.cfg,
            model.revision,
            model.prefix,
            corpus,
            show,
            most=values.prototypes,
            model=config.model.name,
            texts=texts.name,
        )
    if not report["coverage"]:
        print("no text was held out, so nothing says how much the library covers; see --held_out")
    for cover in report["coverage"]:
        print(
            f"{cover['size']} prototypes: {cover['at_99']:.1%} of held-out tokens at .99, {cover['at_90']:.1%} at .9"
        )
    print(json.dumps(report))
    return 0


def _alone(config: Config) -> Config:
    """The configuration for the build: as the replicas', but for what concerns other requests and other nodes."""
    cache = replace(config.cache, shadow=0.0, max_drift=None)
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
    if config.model.tensor_parallel > 1:
        raise UserError("jgr kv build: computes on one device, not with model.tensor_parallel")
    engine = load_any(_alone(config), kinds=["rank"])
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
