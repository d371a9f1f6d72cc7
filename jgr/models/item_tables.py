# SPDX-License-Identifier: Apache-2.0
"""The items' embeddings of a scorer, among its parameters or in a table of their own (HLEM-1).

The one idea: a scorer's functions take embeddings by `params.embed[rows]` alone. So who serves from a table gathers the
rows that a program reads into an array [n, D], gives it as `params.embed`, and names the rows by their places in it:
the functions, and the numbers that they compute with, are the same.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr.models import checkpoint, table_file
from jgr.models.devices import ON_ONE, Placement
from jgr.models.model_files import ModelFiles
from jgr.models.params import PyTree
from jgr.models.room import require_memory
from jgr.models.table_file import ITEMS, TableError, TableFile

NAME = "items"
WriteBeside = Callable[[Path], None]


def apart(
    params: PyTree, dtype: str, write_beside: WriteBeside, held: int | None = None
) -> tuple[PyTree, WriteBeside]:
    """The parameters without the items' embeddings, and what writes these to ITEMS besides, after `write_beside`.

    dtype: of the rows; "none": nothing is changed. held: how many of the first rows the file has; None: all.
    """
    if dtype == "none":
        return params, write_beside
    embed = np.asarray(params.embed)

    def write(folder: Path) -> None:
        write_beside(folder)
        model = ModelFiles(folder).identity()
        rows, width = embed.shape
        table_file.write(
            folder / ITEMS,
            NAME,
            [embed[:held]],
            width=width,
            dtype=dtype,  # type: ignore[arg-type]
            model=model,
            rows=rows,
        )

    return dataclasses.replace(params, embed=None), write


def are_apart(folder: Path) -> bool:
    """Whether a model's folder has a table of its items' embeddings."""
    return (folder / ITEMS).is_file()


def keep_first(folder: Path, out: Path, rows: int) -> None:
    """Write to `out` the model of a folder with only the first rows of its table; what stands there is replaced.

    It is the same model, so the others may be in any shard of it. Raises TableError, CheckpointError.
    """
    table = TableFile(folder / ITEMS)
    header, step = table.header, max(1, table_file.READ_BYTES // table.header.row_bytes)
    beside = folder / ITEMS.parent
    with checkpoint.replacing(out) as aside:
        shutil.copytree(
            folder,
            aside,
            ignore=lambda at, names: {ITEMS.name} if Path(at) == beside else set(),
            dirs_exist_ok=True,
        )
        table_file.write(
            aside / ITEMS,
            header.name,
            (table.rows[at : min(at + step, rows)] for at in range(0, rows, step)),
            width=header.width,
            dtype=header.dtype,
            model=header.model,
            rows=header.rows,
            ids=header.ids,
        )
        if not table.unchanged:
            raise TableError(f"{table.path}: was written to while it was read")


def declared(folder: Path, specs: PyTree) -> PyTree:
    """The declaration of the parameters that stand in the folder's params/."""
    return dataclasses.replace(specs, embed=None) if are_apart(folder) else specs


def open_table(folder: Path, specs: PyTree, files: ModelFiles) -> TableFile:
    """The table of a model's folder. Raises TableError where it is not this model's."""
    rows, width = specs.embed.shape
    return TableFile(folder / ITEMS, name=NAME, rows=rows, width=width, model=files.identity())


def joined(
    folder: Path, specs: PyTree, params: PyTree, files: ModelFiles, placement: Placement = ON_ONE
) -> PyTree:
    """The parameters with the folder's table among them, in float32. Raises TableError, CheckpointError."""
    if not are_apart(folder):
        return params
    table = open_table(folder, specs, files)
    if table.header.held < table.header.rows:
        raise TableError(
            f"{table.path}: has {table.header.held} of {table.header.rows} rows, so it is served with "
            "embeddings.tables=paged and embeddings.remote"
        )
    size = 4 * table.rows.size
    require_memory(size, size)
    embed = placement.put(specs.embed, np.asarray(table.rows, np.float32))
    return dataclasses.replace(params, embed=embed)


def width(specs: PyTree) -> int:
    """Numbers of an item's embedding."""
    found: int = specs.embed.shape[1]
    return found


def given(params: PyTree, rows: Any) -> PyTree:
    """The parameters with gathered rows [n, D], or their shape, as the items' embeddings."""
    return dataclasses.replace(params, embed=rows)


def shape(specs: PyTree, count: int) -> jax.ShapeDtypeStruct:
    """The shape of `count` gathered rows."""
    return jax.ShapeDtypeStruct((count, width(specs)), np.float32)
