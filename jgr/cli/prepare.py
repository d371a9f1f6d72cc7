# SPDX-License-Identifier: Apache-2.0
"""`jgr prepare`: turns raw files, published or your own, into a dataset that `jgr train` takes.

It continues where an interrupted run stopped, and says how columns were read and what is left out. The last line of
stdout is the counts as one JSON document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import UserError

HELP = "turn raw interaction data into a dataset"


def define_flags() -> None:
    splits = ("leave_one_out", "time", "given")
    flags.DEFINE_string(
        "source",
        None,
        "the raw format: generic for your own files, or a dataset's name; a wrong name lists all",
    )
    flags.DEFINE_string("raw", None, "the folder with the raw files")
    flags.DEFINE_string("out", None, "the folder to write")
    flags.DEFINE_enum(
        "split", None, splits, "how valid and test are split off; default: the source's usual way"
    )
    flags.DEFINE_integer("min_user", 0, "drop users with fewer interactions", lower_bound=0)
    flags.DEFINE_integer("min_item", None, "drop items with fewer interactions", lower_bound=0)
    flags.DEFINE_integer("bpe_vocab", 0, "train a tokenizer of so many tokens on the titles", lower_bound=0)
    flags.DEFINE_enum(
        "time_unit", None, ("s", "ms", "us", "ns"),
        "what numbers in the column timestamp count (generic); default: by their size, and said",
    )  # fmt: skip
    flags.DEFINE_list(
        "actions",
        [],
        "columns that say what users did, COLUMN or COLUMN:LEAST (generic); default: all that can",
    )
    flags.DEFINE_bool("allow_counts", False, "only warn if counts differ from those known for a source")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    values = flags.FLAGS
    for name in ("source", "raw", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is not set")
    from jgr.data.preparation.prepare import Options, prepare
    from jgr.data.sources.records import TableOptions

    options = Options(
        source=values.source,
        raw=Path(values.raw),
        out=Path(values.out),
        split=values.split,
        min_user=values.min_user,
        min_item=values.min_item,
        bpe_vocab=values.bpe_vocab,
        allow_counts=values.allow_counts,
        tables=TableOptions(values.time_unit or "", tuple(values.actions)),
        overwrite=values.overwrite,
    )
    manifest, fresh = prepare(options)
    print(options.out if fresh else f"{options.out} is prepared already")
    for note in manifest.get("notes", ()):
        print(note)
    print(json.dumps(manifest["counts"]))
    return 0
