# SPDX-License-Identifier: Apache-2.0
"""`jgr features load`: fills a feature store with the item metadata of a prepared dataset.

The last line of stdout is one JSON document that says what was loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import UserError
from jgr.fields import one_line

HELP = "load: fill a feature store with a prepared dataset's item features"
BATCH = 1000


def define_flags() -> None:
    flags.DEFINE_string("data", "", "folder that jgr prepare wrote")
    flags.DEFINE_string(
        "feature_store", "", "redis://host:port/db or an SQLite file; short for --set features.store=..."
    )
    console.define_overwrite()


def main(argv: Sequence[str]) -> None:
    if not argv:
        print("jgr features load --data=FOLDER --feature_store=redis://HOST:PORT/DB | FILE")
        return
    name, *rest = argv
    console.refuse_arguments(rest)
    if name != "load":
        raise UserError(f"there is no 'jgr features {name}'; there is load")
    config = console.load(flags.FLAGS).features
    if flags.FLAGS.feature_store:
        config = dataclasses.replace(config, store=flags.FLAGS.feature_store)
    if not flags.FLAGS.data:
        raise UserError("--data: name the folder that jgr prepare wrote")
    if not config.store:
        raise UserError("--feature_store: name a store, redis://host:port/db or an SQLite file")
    from jgr.data.prepared import load_prepared
    from jgr.features import extraction
    from jgr.features.addresses import REDIS_SCHEMES, open_store
    from jgr.features.schema import MAX_SHOWN, Schema
    from jgr.files import refuse_overwriting

    prepared = load_prepared(flags.FLAGS.data)
    ids, metadata = prepared.item_ids, prepared.metadata
    if not config.schema and (left := extraction.misnamed(metadata)):
        names = ", ".join(repr(one_line(name, MAX_SHOWN)) for name in left)
        print(
            f"left out: {names}: a feature's name has ASCII letters, digits, '_', '.' and '-', and no digit first"
        )
    schema = Schema.parse(config.schema) if config.schema else extraction.derive(metadata)
    known = {name for fields in metadata for name in fields}
    if unknown := sorted({feature.name for feature in schema.features} - known):
        raise UserError(
            f"features.schema: no item has {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    records = extraction.extract(schema, ids, metadata)
    store = open_store(config.store, config.timeout_ms / 1e3, create=True)
    before = store.schema()
    # A server's address may hold a password.
    where = "Redis" if config.store.startswith(REDIS_SCHEMES) else config.store
    if before is not None:
        refuse_overwriting(Path(where), flags.FLAGS.overwrite, "--feature_store", "features of items")
    starts = range(0, len(ids), BATCH)
    for start in console.progress(starts, "features", len(starts)):
        store.put_many(ids[start : start + BATCH], records[start : start + BATCH])
    store.set_schema(str(schema))
    store.close()
    if before not in (None, str(schema)):
        print(f"the schema was {before}: restart what serves from this store")
    loaded = {"items": len(ids), "record_bytes": schema.record_bytes, "schema": str(schema)}
    print(f"{where}: {len(ids)} items, {schema.record_bytes} bytes each: {schema}")
    print(json.dumps(loaded))
