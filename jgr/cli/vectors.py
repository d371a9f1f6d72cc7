# SPDX-License-Identifier: Apache-2.0
"""`jgr vectors`: item vectors from what the items' metadata says, or from which items users take near each other.

They help a retriever (`train.item_vectors`) and semantic ids (`jgr ids --vectors`). The dataset is that of data.*, as
for `jgr train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr.cli import console
from jgr.config import UserError

HELP = "make item vectors of a dataset, for training and semantic ids"


def define_flags() -> None:
    flags.DEFINE_string(
        "out", None, "the .npy file to write: [items, dimensions] float32 in the catalog's order"
    )
    flags.DEFINE_enum(
        "of",
        "text",
        ("text", "sequences"),
        "text: the words of the items' metadata; sequences: which items are near each other in training sequences",
    )
    flags.DEFINE_list(
        "fields", [], "with --of=text: fields of the metadata to read; none: all that hold text"
    )
    flags.DEFINE_integer("dims", 256, "dimensions of a vector", lower_bound=1)
    flags.DEFINE_integer(
        "window", 3, "with --of=sequences: steps between items that count as near", lower_bound=1
    )
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    values = flags.FLAGS
    if not values.out:
        raise UserError("--out: the file to write is not set")
    if not values.out.endswith(".npy"):
        raise UserError(f"--out: the name of a .npy file, not {values.out}")
    console.refuse_unused(values.of == "text", ("fields",), "--of=text")
    console.refuse_unused(values.of == "sequences", ("window",), "--of=sequences")
    import numpy as np

    from jgr.data.datasets import load_dataset
    from jgr.files import refuse_overwriting, writing
    from jgr.training.item_vectors import VectorError, co_occurrence_vectors
    from jgr.training.text_vectors import text_vectors

    path = Path(values.out)
    if path.exists():
        refuse_overwriting(path, values.overwrite, "--out", "a file")
    dataset = load_dataset(console.load(values).data)
    if values.of == "text":
        vectors = text_vectors(dataset.catalog.metadata, fields=values.fields, dims=values.dims)
        without = int((~vectors.any(axis=1)).sum())
        print(f"{len(vectors)} items, {without} without a word that others have too")
    else:
        sequences, n_items = dataset.interactions.sequences, dataset.catalog.n_items
        found = co_occurrence_vectors(sequences, n_items, dims=values.dims, window=values.window)
        # Noise tells items apart in semantic ids; for an embedding no vector is better than a wrong one.
        vectors = np.where(found.placed[:, None], found.vectors, 0).astype(np.float32)
        print(f"{len(vectors)} items, {int((~found.placed).sum())} that are near no other")
    with writing(path, VectorError) as stream:
        np.save(stream, vectors)
    print(path)
    return 0
