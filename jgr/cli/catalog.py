# SPDX-License-Identifier: Apache-2.0
"""`jgr catalog`: `build` turns a catalog file into memory-mapped arrays, for millions of items; `inspect` shows one.

The lines are for people; the last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import UserError

HELP = "build: turn a catalog into memory-mapped arrays, for millions of items; inspect: show its tree"


def define_flags() -> None:
    flags.DEFINE_string("catalog", "", "the catalog to read: *.jsonl[.gz], *.index.json[.gz] or *.catalog")
    flags.DEFINE_string("out", "", "for build: the new folder, named *.catalog")
    console.define_overwrite()


def main(argv: Sequence[str]) -> None:
    if not argv:
        print("jgr catalog build --catalog=FILE --out=FOLDER.catalog\njgr catalog inspect --catalog=FILE")
        return
    name, *rest = argv
    console.refuse_arguments(rest)
    if name not in ("build", "inspect"):
        raise UserError(f"there is no 'jgr catalog {name}'; there are build and inspect")
    console.refuse_unused(name == "build", ("out", "overwrite"), "jgr catalog build")
    if not flags.FLAGS.catalog:
        raise UserError("--catalog: name a catalog")
    if name == "build":
        _build(Path(flags.FLAGS.catalog), flags.FLAGS.out)
    else:
        _inspect(Path(flags.FLAGS.catalog))


def _build(source: Path, out: str) -> None:
    from jgr.catalog.catalog import load_catalog, load_columns, save_catalog
    from jgr.catalog.columns import SUFFIX
    from jgr.files import refuse_overwriting

    if not out.endswith(SUFFIX):
        raise UserError(f"--out: a folder named *{SUFFIX}, found {out!r}")
    place = Path(out).resolve()  # of a link, what it leads to
    if place.exists():
        refuse_overwriting(place, flags.FLAGS.overwrite, "--out", "a catalog")
        load_catalog(out)  # nothing else is ever removed
    start = time.monotonic()
    lines = source.name.removesuffix(".gz").endswith(".jsonl")
    catalog = load_columns(source) if lines else load_catalog(source)
    # What is there stays until the new one is whole.
    new, old = (place.with_name(f".{place.name}.{os.getpid()}.{which}{SUFFIX}") for which in ("new", "old"))
    try:
        save_catalog(catalog, new)
        if place.exists():
            place.rename(old)
        new.rename(place)
    except BaseException:
        if old.exists() and not place.exists():
            old.rename(place)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    found = {"catalog": out, "version": catalog.version, "items": catalog.n_items}
    print(f"{out}: {catalog.n_items} items, version {catalog.version}")
    print(json.dumps({**found, "build_s": round(time.monotonic() - start, 3)}))


def _inspect(path: Path) -> None:
    from jgr.catalog.catalog import load_catalog
    from jgr.catalog.prefix_tree import PrefixTree

    start = time.monotonic()
    catalog = load_catalog(path)
    loaded = time.monotonic()
    tree = PrefixTree.build(catalog.codes)
    found = {
        "version": catalog.version,
        "items": catalog.n_items,
        "semantic_ids": tree.n_leaves,
        "level_sizes": list(catalog.level_sizes),
        "nodes": [len(codes) for codes in tree.codes],
        "max_degrees": list(tree.max_degrees),
        "load_s": round(loaded - start, 3),
        "tree_s": round(time.monotonic() - loaded, 3),
        "peak_mib": _peak_mib(),
    }
    for name, value in found.items():
        print(f"{name:<13}{value}")
    print(json.dumps(found))


def _peak_mib() -> int | None:
    """The peak memory of this process in MiB, pages of mapped files included; None if the system does not tell."""
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(peak[1]) >> 10 if peak else None
