# SPDX-License-Identifier: Apache-2.0
"""`jgr embeddings upload FOLDER`: puts the embedding rows of a model into a Redis server, from which
`jgr serve --set embeddings.remote=...` reads what its folder lacks. The last line of stdout is one JSON document that
says what is there.

Any family will do whose folder has tables (train.tables, or jgr convert --tables). --local_rows=N leaves the first N
rows of each table out, so that one of N rows or fewer is not uploaded at all, and with --out writes a folder that has
only these. An upload that was ended goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import UserError

if TYPE_CHECKING:
    from jgr.models.table_file import TableFile

HELP = "upload FOLDER: put the rows of a model's tables of embeddings into a Redis server"
TIMEOUT_S = 30.0


def define_flags() -> None:
    flags.DEFINE_string(
        "remote",
        "",
        "Redis server that gets the rows, redis://host:port/db; short for --set embeddings.remote=...",
    )
    flags.DEFINE_integer(
        "local_rows",
        None,
        "how many of each table's first rows are not uploaded; default: none",
        lower_bound=0,
    )
    flags.DEFINE_string("out", None, "folder to write: the model with the rows of --local_rows alone")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    if not argv:
        print("jgr embeddings upload FOLDER --remote=redis://HOST:PORT/DB [--local_rows=N [--out=FOLDER]]")
        return 0
    name, *rest = argv
    if name != "upload":
        raise UserError(f"there is no 'jgr embeddings {name}'; there is upload")
    config, values = console.load_folder(flags.FLAGS, rest), flags.FLAGS
    remote = values.remote or config.embeddings.remote
    if not config.model.path:
        raise UserError("name the model's folder: jgr embeddings upload FOLDER")
    if not remote:
        raise UserError("--remote: name the server that gets the rows, redis://host:port/db")
    if values.out and values.local_rows is None:
        raise UserError("--out: say with --local_rows how many rows the folder keeps")
    extras.require("redis", "jgr embeddings upload")
    out = Path(values.out) if values.out else None
    report = upload(Path(config.model.path), remote, values.local_rows or 0, out, values.overwrite)
    for table, there in report.items():
        print(
            f"table {table}: {there['rows']} rows of {there['row_bytes']} bytes are in the server of --remote, "
            f"{there['new']} are new"
        )
    if out:
        print(
            f"{out}: has the first {values.local_rows} rows; serve it with embeddings.tables=paged and .remote"
        )
    print(json.dumps(report))
    return 0


def upload(
    folder: Path, remote: str, local_rows: int, out: Path | None, overwrite: bool
) -> dict[str, dict[str, int]]:
    """Put each table's rows from local_rows on into a server, and write `out` once they are there. Returns what is
    there of each. Raises UserError."""
    from jgr.models import tables

    if out:
        _require_place(out, folder, overwrite)
    whole = _whole_tables(folder)
    if local_rows >= (most := max(table.header.rows for table in whole)):
        raise UserError(
            f"--local_rows: {local_rows}, but the largest table has {most} rows: none is left to upload"
        )
    cut = [table for table in whole if table.header.rows > local_rows]
    report = {table.header.name: _upload(table, remote, local_rows, overwrite) for table in cut}
    if out:
        tables.keep_first(folder, out, cut, local_rows)
    return report


def _upload(table: TableFile, remote: str, first: int, overwrite: bool) -> dict[str, int]:
    import msgspec

    from jgr.embeddings import redis_shard

    header = msgspec.structs.replace(table.header, first=first, held=table.header.rows - first)
    with console.progress_bar(f"rows of {header.name}") as show:
        rows = table.rows[first:]
        new = redis_shard.upload(remote, header, rows, TIMEOUT_S, overwrite=overwrite, show=show)
    if not table.unchanged:
        raise UserError(
            f"{table.path}: was written to while it was uploaded; upload it again, with --overwrite"
        )
    return {"rows": header.held, "first": header.first, "row_bytes": header.row_bytes, "new": new}


def _require_place(out: Path, folder: Path, overwrite: bool) -> None:
    from jgr.files import refuse_overwriting
    from jgr.models import checkpoint

    if out.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"--out: {out} is the model's own folder, or in it")
    if (out / "params").is_dir():
        refuse_overwriting(out, overwrite, "--out", "a model")
    checkpoint.require_writable(out)


def _whole_tables(folder: Path) -> list[TableFile]:
    """The tables of a model's folder, once they are known to be undamaged and whole."""
    from jgr.models import scorers, tables
    from jgr.models.model_files import ModelFiles

    path = tables.path_of(tables.ITEMS)
    if not (folder / path).is_file():
        raise UserError(
            f"{folder} has no {path}; train it with train.tables=float32, or convert it with --tables=float32"
        )
    files = ModelFiles(folder)
    scorers.require_size(folder, files)
    files.check()
    cfg = scorers.load_config(folder)
    specs = scorers.scorer(cfg).spec(cfg)
    found = [tables.open_table(folder, name, specs, files) for name in tables.there(folder, cfg)]
    for table in found:
        table.verify()
        of = table.header
        if of.held < of.rows:
            raise UserError(
                f"{table.path}: has {of.held} of {of.rows} rows; upload them from the folder that has all"
            )
    return found
