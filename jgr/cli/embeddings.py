# SPDX-License-Identifier: Apache-2.0
"""`jgr embeddings upload FOLDER`: puts the embedding rows of a model into a Redis server, from which
`jgr serve --set embeddings.remote=...` reads what its folder lacks. The last line of stdout is one JSON document that
says what is there.

Any family will do whose folder has a table (train.tables, or jgr convert --tables). --local_rows=N leaves the first N
rows out, and with --out writes a folder that has only these. An upload that was ended goes on where it was.
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

HELP = "upload: put the rows of a model's table of embeddings into a Redis server"
TIMEOUT_S = 30.0


def define_flags() -> None:
    flags.DEFINE_string(
        "remote",
        "",
        "Redis server that gets the rows, redis://host:port/db; short for --set embeddings.remote=...",
    )
    flags.DEFINE_integer(
        "local_rows", None, "how many of the first rows are not uploaded; default: none", lower_bound=0
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
    print(
        f"{report['rows']} rows of {report['row_bytes']} bytes are in the server of --remote, {report['new']} are new"
    )
    if out:
        print(
            f"{out}: has the first {values.local_rows} rows; serve it with embeddings.tables=paged and .remote"
        )
    print(json.dumps(report))
    return 0


def upload(folder: Path, remote: str, local_rows: int, out: Path | None, overwrite: bool) -> dict[str, int]:
    """Put the rows from local_rows on into a server, and write `out` once they are there. Raises UserError."""
    import msgspec

    from jgr.embeddings import redis_shard
    from jgr.models import tables

    if out:
        _require_place(out, folder, overwrite)
    table = _whole_table(folder)
    header = table.header
    if local_rows >= header.rows:
        raise UserError(
            f"--local_rows: {local_rows}, but the table has {header.rows} rows: none is left to upload"
        )
    header = msgspec.structs.replace(header, first=local_rows, held=header.rows - local_rows)
    with console.progress_bar("rows") as show:
        rows = table.rows[local_rows:]
        new = redis_shard.upload(remote, header, rows, TIMEOUT_S, overwrite=overwrite, show=show)
    if not table.unchanged:
        raise UserError(
            f"{table.path}: was written to while it was uploaded; upload it again, with --overwrite"
        )
    if out:
        tables.keep_first(folder, out, local_rows)
    return {"rows": header.held, "first": header.first, "row_bytes": header.row_bytes, "new": new}


def _require_place(out: Path, folder: Path, overwrite: bool) -> None:
    from jgr.files import refuse_overwriting
    from jgr.models import checkpoint

    if out.resolve() == folder.resolve():
        raise UserError(f"--out: {out} is the model's own folder, which would lose its rows")
    if (out / "params").is_dir():
        refuse_overwriting(out, overwrite, "--out", "a model")
    checkpoint.require_writable(out)


def _whole_table(folder: Path) -> TableFile:
    """The table of a model's folder, once it is known to be undamaged and whole."""
    from jgr.models import scorers, tables
    from jgr.models.model_files import ModelFiles

    path = tables.path_of(tables.ITEMS)
    if not (folder / path).is_file():
        raise UserError(
            f"{folder} has no {path}; train it with train.tables=float32, or convert it with --tables=float32"
        )
    files = ModelFiles(folder)
    files.check()
    cfg = scorers.load_config(folder)
    table = tables.open_table(folder, tables.ITEMS, scorers.scorer(cfg).spec(cfg), files)
    table.verify()
    of = table.header
    if of.held < of.rows:
        raise UserError(
            f"{table.path}: has {of.held} of {of.rows} rows; upload them from the folder that has all"
        )
    return table
