# SPDX-License-Identifier: Apache-2.0
"""`jgr ids`: makes semantic ids for a prepared dataset from item vectors, given or computed, or from a table.

A dataset can have several catalogs side by side, each with a name; a model's folder holds the one that it learnt on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import UserError
from jgr.config.training import CATALOG_NAME

if TYPE_CHECKING:
    from jgr.data.prepared import Prepared
    from jgr.training.item_vectors import Float32
    from jgr.training.semantic_ids import Int32, Quantized

HELP = "give the items of a prepared dataset semantic ids"
REPORT = "ids_report.json"
MAX_SEED = 2**31 - 1

_log = logging.getLogger(__name__)


def define_flags() -> None:
    flags.DEFINE_string("data", None, "folder that jgr prepare wrote; the catalog is written into it")
    flags.DEFINE_string("name", "", "name of the catalog, beside others; models choose one by data.catalog")
    flags.DEFINE_string(
        "vectors",
        None,
        ".npy of [items, dimensions] floats in the order of items.jsonl; several, separated by commas, side by side",
    )
    flags.DEFINE_string("table", None, "take the ids of this .tsv[.gz] as they are, with --column")
    flags.DEFINE_string("column", None, "the column of --table that holds the ids")
    flags.DEFINE_bool("normalize", False, "scale each row of --vectors to length 1")
    flags.DEFINE_integer("dims", 64, "dimensions of computed vectors (without --vectors)", lower_bound=1)
    flags.DEFINE_integer(
        "window", 5, "steps between items that count as near (without --vectors)", lower_bound=1
    )
    flags.DEFINE_enum(
        "method",
        "kmeans",
        ("kmeans", "balanced", "rqvae", "item"),
        "how vectors become codes; item: no vectors, each item is a token of its own, as a ranker needs",
    )
    flags.DEFINE_list("sizes", ["256", "256", "256"], "codes of each level, 1 to 8 levels")
    flags.DEFINE_integer("steps", 2000, "training steps of --method=rqvae", lower_bound=1)
    flags.DEFINE_enum(
        "collisions",
        "share",
        ("share", "extra", "reassign", "item"),
        "what to do with items that get the same id; item: one more level names each item itself",
    )
    flags.DEFINE_integer("seed", 0, "seed of all random numbers", lower_bound=0, upper_bound=MAX_SEED)
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    values = flags.FLAGS
    if not values.data:
        raise UserError("--data: the folder that jgr prepare wrote is not set")
    if values.name and not CATALOG_NAME.fullmatch(values.name):
        raise UserError(f"--name: a name of letters, digits, _, . and -, not {values.name!r}")
    _refuse_unused(values)
    sizes = _sizes(values.sizes)
    if values.method == "rqvae":
        extras.require("train", "jgr ids --method=rqvae")
    import numpy as np

    from jgr.catalog.catalog import save_catalog
    from jgr.data.prepared import CATALOG, catalog_path, load_prepared
    from jgr.files import refuse_overwriting, writing
    from jgr.training import semantic_ids
    from jgr.training.semantic_ids import SemanticIdError

    semantic_ids.check_sizes(sizes)
    folder = Path(values.data)
    prepared = load_prepared(folder)
    if not values.name and CATALOG in prepared.manifest["outputs"]:
        raise UserError(f"{folder}: its source brought semantic ids ({CATALOG}): name others with --name")
    path = catalog_path(folder, values.name)
    if path.exists():
        refuse_overwriting(path, values.overwrite, "--name", "semantic ids")
    if values.table:
        codes, raw_codes, described = _given(values, prepared)
    elif values.method == "item":
        codes = raw_codes = np.arange(len(prepared.item_ids), dtype=np.int32)[:, None]
        described = {"method": "item"}
    else:
        vectors, source = _vectors(values, prepared)
        quantized, error = _quantized(values, vectors, sizes)
        codes, raw_codes = semantic_ids.resolve_collisions(quantized, values.collisions), quantized.codes
        described = {"vectors": source, "method": values.method, "seed": values.seed, **error}
    # A level that --sizes does not describe, such as one of a table, is as large as its largest code.
    known = () if values.table or values.method == "item" else sizes
    all_sizes = [*known, *map(int, codes.max(axis=0)[len(known) :] + 1)]
    catalog = semantic_ids.id_catalog(prepared.item_ids, codes, prepared.metadata)
    report = semantic_ids.report(codes, all_sizes)
    raw = semantic_ids.report(raw_codes, all_sizes[: raw_codes.shape[1]])["collision_rate"]
    summary = {
        "catalog_version": catalog.version,
        **described,
        "collisions": values.collisions,
        "collision_rate_before": raw,
        **report,
    }
    with writing(folder / (f"{values.name}.{REPORT}" if values.name else REPORT), SemanticIdError) as stream:
        stream.write(json.dumps(summary, indent=2).encode() + b"\n")
    save_catalog(catalog, path)
    if useless := semantic_ids.useless_levels(codes[:, : len(known)]):
        _log.warning("--sizes: %s", useless)
    if values.collisions == "reassign" and report["collision_rate"]:
        _log.warning(
            "items still share ids, since a prefix has more items than the last level has codes: larger or more "
            "--sizes part them"
        )
    print(semantic_ids.format_report(report))
    if values.collisions != "share":
        print(f"collision rate before {values.collisions}: {raw:.4f}")
    if values.name:
        print(f"train on them with --set data.catalog={values.name}")
    print(path)
    return 0


def _refuse_unused(values: flags.FlagValues) -> None:
    """Raise UserError for a flag that has no effect beside the others."""
    of_items, of_vectors = values.method == "item", not values.table and values.method != "item"
    for used, names, what in (
        (not values.table, ("method",), "ids that no --table brings"),
        (bool(values.table), ("column",), "--table"),
        (of_vectors, ("vectors", "sizes", "seed"), "ids from vectors, without --table and --method=item"),
        (
            of_vectors and bool(values.vectors),
            ("normalize",),
            "--vectors; computed vectors have length 1 already",
        ),
        (of_vectors and not values.vectors, ("dims", "window"), "computed vectors, without --vectors"),
        (of_vectors and values.method == "rqvae", ("steps",), "--method=rqvae"),
        (not of_items, ("collisions",), "ids that items may share, which those of --method=item are not"),
    ):
        console.refuse_unused(used, names, what)


def _given(values: flags.FlagValues, prepared: Prepared) -> tuple[Int32, Int32, dict[str, Any]]:
    """The codes of --table, after and before --collisions, and their origin for the report."""
    from jgr.data.id_tables import read_id_table
    from jgr.training.semantic_ids import number_duplicates, own_level

    if not values.column:
        raise UserError("--column: the column of --table is not set")
    if values.collisions == "reassign":
        raise UserError("--table brings ids, no vectors: it does not go with --collisions=reassign")
    path = Path(values.table)
    given = read_id_table(path, values.column, prepared.item_ids)
    more = {"extra": number_duplicates, "item": own_level}.get(values.collisions)
    codes = given if more is None else more(given)
    return codes, given, {"table": path.name, "column": values.column}


def _sizes(texts: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, texts))
    except ValueError:
        raise UserError(f"--sizes: expected integers as in 256,256,256, found {','.join(texts)!r}") from None


def _vectors(values: flags.FlagValues, prepared: Prepared) -> tuple[Float32, dict[str, Any]]:
    """The item vectors, and their origin for the report."""
    from jgr.training.item_vectors import co_occurrence_vectors, read_vectors, unit_rows

    n = len(prepared.item_ids)
    if values.vectors:
        vectors = read_vectors(values.vectors, n)
        files = ",".join(Path(path.strip()).name for path in values.vectors.split(","))
        source = {"file": files, "normalized": values.normalize}
        return (unit_rows(vectors) if values.normalize else vectors), source
    found = co_occurrence_vectors(
        prepared.interactions.sequences, n, dims=values.dims, window=values.window, seed=values.seed
    )
    unplaced = n - int(found.placed.sum())
    return found.vectors, {
        "computed": "co-occurrence",
        "dims": values.dims,
        "window": values.window,
        "unplaced_items": unplaced,
    }


def _quantized(
    values: flags.FlagValues, vectors: Float32, sizes: tuple[int, ...]
) -> tuple[Quantized, dict[str, float]]:
    """The quantised items, and the errors for the report."""
    if values.method == "rqvae":
        from jgr.training.rq_vae import RqVaeConfig, train_rq_vae

        config = RqVaeConfig(sizes=sizes, steps=values.steps, seed=values.seed)
        with console.progress_bar("rqvae") as bar:
            trained = train_rq_vae(vectors, config, bar)
        return trained.quantized, {
            "quantization_error": trained.quantized.error,
            "reconstruction_error": trained.error,
        }
    from jgr.training.semantic_ids import residual_kmeans

    with console.progress_bar(values.method) as bar:
        balanced = values.method == "balanced"
        found = residual_kmeans(vectors, sizes, seed=values.seed, balanced=balanced, progress=bar)
    return found, {"quantization_error": found.error}
