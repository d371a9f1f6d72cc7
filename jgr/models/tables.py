# SPDX-License-Identifier: Apache-2.0
"""The embedding tables of a scorer, among its parameters or in files of their own (HLEM-1): its items', and those of
what else requests and features name by ids, which are the values of STU's slots and Climber's categories.

The one idea: a scorer's functions take embeddings by `table[rows]` alone. So who serves from files gathers the rows
that a program reads into an array [n, E], gives it in the table's place, and names the rows by their places in it: the
functions, and the numbers that they compute with, are the same.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr import stopping
from jgr.models import checkpoint, table_file
from jgr.models.climber import ClimberConfig
from jgr.models.devices import ON_ONE, Placement
from jgr.models.model_files import ModelFiles
from jgr.models.params import PyTree
from jgr.models.room import require_memory
from jgr.models.stu_scorer import StuScorerConfig
from jgr.models.table_file import TableError, TableFile

ITEMS, SLOTS, FEATURE = "items", "slots", "features."
"""Names of tables: of items; of the values of all slots; of a feature's categories, with its name behind it."""
LEAST_ROWS = 1024
"""A table of fewer rows, other than the items', stays among the parameters: it would take a page of its own, which is
as large as itself or larger."""
WriteBeside = Callable[[Path], None]


def of(cfg: Any) -> tuple[str, ...]:
    """The names of the tables that a scorer of this config has."""
    if isinstance(cfg, ClimberConfig):
        return (ITEMS, *(FEATURE + feature.name for feature in cfg.features if feature.rows))
    return (ITEMS, SLOTS) if isinstance(cfg, StuScorerConfig) and cfg.slots else (ITEMS,)


def leaf(params: PyTree, name: str) -> Any:
    """The table of that name, or its declaration, among a scorer's parameters."""
    if name.startswith(FEATURE):
        return params.features[name.removeprefix(FEATURE)]
    return params.slots if name == SLOTS else params.embed


def replaced(params: PyTree, tables: Mapping[str, Any]) -> PyTree:
    """The parameters with other arrays, shapes or None as their tables of these names."""
    fields = {name: tables[of] for name, of in (("embed", ITEMS), ("slots", SLOTS)) if of in tables}
    features = {
        name.removeprefix(FEATURE): value for name, value in tables.items() if name.startswith(FEATURE)
    }
    if features:
        fields["features"] = {**params.features, **features}
    return dataclasses.replace(params, **fields)


def missing(cfg: Any, params: PyTree) -> tuple[str, ...]:
    """The names of the tables that are not among the parameters."""
    return tuple(name for name in of(cfg) if leaf(params, name) is None)


def path_of(name: str) -> Path:
    """Where a table stands in a model's folder."""
    return Path("embeddings") / f"{name}.table"


def apart(
    cfg: Any, params: PyTree, dtype: str, write_beside: WriteBeside, held: int | None = None
) -> tuple[PyTree, WriteBeside]:
    """The parameters without the items' embeddings and other tables of at least LEAST_ROWS rows, and what writes these
    to files besides, after `write_beside`.

    dtype: of the rows; "none": nothing is changed. held: how many of the items' first rows the file has; None: all.
    """
    if dtype == "none":
        return params, write_beside
    arrays = {name: np.asarray(leaf(params, name)) for name in of(cfg)}
    arrays = {name: rows for name, rows in arrays.items() if name == ITEMS or len(rows) >= LEAST_ROWS}

    def write(folder: Path) -> None:
        write_beside(folder)
        model = ModelFiles(folder).identity()
        for name, rows in arrays.items():
            count, width = rows.shape
            kept = rows[: held if name == ITEMS else None]
            table_file.write(
                folder / path_of(name),
                name,
                [kept],
                width=width,
                dtype=dtype,  # type: ignore[arg-type]
                model=model,
                rows=count,
                whole=table_file.digest_of([rows], dtype) if len(kept) < count else "",  # type: ignore[arg-type]
            )

    return replaced(params, dict.fromkeys(arrays)), write


def there(folder: Path, cfg: Any) -> tuple[str, ...]:
    """The names of the tables that a model's folder has as files."""
    return tuple(name for name in of(cfg) if (folder / path_of(name)).is_file())


def keep_first(folder: Path, out: Path, cut: Sequence[TableFile], rows: int) -> None:
    """Write to `out` the model of a folder with only the first rows of the tables `cut`, which are the folder's and
    have more; what stands there is replaced.

    It is the same model, so the others may be in any shard of it. Raises TableError, CheckpointError.
    """
    names, beside = {table.path.name for table in cut}, folder / path_of(ITEMS).parent
    with checkpoint.replacing(out) as aside:
        shutil.copytree(
            folder,
            aside,
            ignore=lambda at, _: names if Path(at) == beside else set(),
            dirs_exist_ok=True,
        )
        for table in cut:
            header, step = table.header, max(1, table_file.READ_BYTES // table.header.row_bytes)
            table_file.write(
                aside / path_of(header.name),
                header.name,
                (table.rows[at : min(at + step, rows)] for at in range(0, rows, step)),
                width=header.width,
                dtype=header.dtype,
                model=header.model,
                rows=header.rows,
                whole=header.whole,
            )
            if not table.unchanged:
                raise TableError(f"{table.path}: was written to while it was read")


def declared(folder: Path, cfg: Any, specs: PyTree) -> PyTree:
    """The declaration of the parameters that stand in the folder's params/."""
    return replaced(specs, dict.fromkeys(there(folder, cfg)))


def require_size(folder: Path, cfg: Any, specs: PyTree, files: ModelFiles) -> None:
    """Raise CheckpointError where the folder's parameters or tables are larger than those of its config can be, which
    is told before they are hashed."""
    files.require_size(checkpoint.most_bytes(declared(folder, cfg, specs)))
    sizes = [4 * leaf(specs, name).shape[0] * leaf(specs, name).shape[1] for name in there(folder, cfg)]
    files.require_size(
        sum(sizes) + len(sizes) * table_file.HEADER_BYTES + checkpoint.SPARE_BYTES, "embeddings"
    )


def open_table(folder: Path, name: str, specs: PyTree, files: ModelFiles) -> TableFile:
    """A table of a model's folder. Raises TableError where it is not this model's."""
    rows, width = leaf(specs, name).shape
    return TableFile(folder / path_of(name), name=name, rows=rows, width=width, model=files.identity())


def joined(
    folder: Path, cfg: Any, specs: PyTree, params: PyTree, files: ModelFiles, placement: Placement = ON_ONE
) -> PyTree:
    """The parameters with the folder's tables among them, in float32. Raises TableError, CheckpointError."""
    found = dict[str, Any]()
    for name in there(folder, cfg):
        table = open_table(folder, name, specs, files)
        if table.header.held < table.header.rows:
            raise TableError(
                f"{table.path}: has {table.header.held} of {table.header.rows} rows, so it is served with "
                "embeddings.tables=paged and embeddings.remote"
            )
        stopping.check()
        size = 4 * table.rows.size
        require_memory(size, size)
        found[name] = placement.put(leaf(specs, name), np.asarray(table.rows, np.float32))
    return replaced(params, found)


def shape(specs: PyTree, name: str, count: int) -> jax.ShapeDtypeStruct:
    """The shape of `count` gathered rows of a table."""
    return jax.ShapeDtypeStruct((count, leaf(specs, name).shape[1]), np.float32)
