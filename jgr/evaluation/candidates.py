# SPDX-License-Identifier: Apache-2.0
"""The candidates that a retriever names for a split's users, which a ranker then orders, as one .npz file.

A ranker is measured on the users whose target is among them (LlamaRec's protocol), so its figures say
nothing without the retriever's recall: `Candidates.recall`.

File: users [e] text ids, in the split's order; candidates [e, k] int32 rows, best first, then -1; target_at [e] int32,
the target's place among them or -1; items, the digest of the catalog's item ids.

Letters: e examples, k candidates each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.datasets import Dataset
from jgr.data.interactions import DataError, Examples
from jgr.data.prepared import load_npz
from jgr.files import writing
from jgr.models import retrievers
from jgr.models.retrievers import RetrieverConfig, RetrieverParams

Int32 = npt.NDArray[np.int32]

TOP_K = 100


@dataclass(frozen=True, eq=False)
class Candidates:
    """Each user's candidates, as a retriever ordered them.

    users: [e] ids. rows: [e, k] int32 catalog rows, best first, -1 where the catalog has no further item. target_at:
    [e] int32, the target's place among the candidates, -1 where it is not one of them. items: the digest of the
    catalog's item ids.
    """

    users: npt.NDArray[np.str_]
    rows: Int32
    target_at: Int32
    items: str

    def recall(self, k: int) -> float:
        """The share of users whose target is in the first k places."""
        return float(((self.target_at >= 0) & (self.target_at < k)).mean())

    @property
    def eligible(self) -> npt.NDArray[np.bool_]:
        """Which users have their target among their candidates, [e] bool."""
        return self.target_at >= 0


def retrieve(
    params: RetrieverParams,
    cfg: RetrieverConfig,
    dataset: Dataset,
    examples: Examples,
    k: int = TOP_K,
    *,
    exclude_seen: bool,
) -> Candidates:
    """The candidates of a split's examples. exclude_seen: leave out the items of the history."""
    rows = retrievers.top_k(
        params, cfg, examples.histories, k, exclude_seen=exclude_seen, asked=examples.target_times
    )
    hits = rows == examples.targets[:, None]
    target_at = np.where(hits.any(axis=1), hits.argmax(axis=1), -1).astype(np.int32)
    users = np.array(dataset.interactions.user_ids)[examples.users]
    return Candidates(users, rows, target_at, cfg.items)


def save_candidates(found: Candidates, path: Path) -> None:
    """Write the file, whole or not at all. Raises DataError where it cannot be written."""
    with writing(path, DataError) as stream:
        np.savez_compressed(
            stream,
            users=found.users,
            candidates=found.rows,
            target_at=found.target_at,
            items=np.array(found.items),
        )


def load_candidates(path: Path, dataset: Dataset) -> Candidates:
    """Read the file that `save_candidates` wrote.

    Raises DataError where it is damaged or names other items than the dataset's.
    """
    content: dict[str, Any] = load_npz(path)
    if content.keys() != {"users", "candidates", "target_at", "items"}:
        raise DataError(f"{path}: holds other arrays than jgr retrieve writes: {sorted(content)}")
    users, rows, target_at = content["users"], content["candidates"], content["target_at"]
    fits = (
        users.dtype.kind == "U"
        and rows.dtype == target_at.dtype == np.int32
        and rows.ndim == 2
        and users.shape == target_at.shape == rows.shape[:1]
    )
    if not fits:
        raise DataError(f"{path}: users, candidates and target_at are not [e], [e, k] int32 and [e] int32")
    items, n_items = str(content["items"]), dataset.catalog.n_items
    if items != retrievers.items_digest(dataset.catalog.item_ids):
        raise DataError(f"{path}: its candidates are of other items than the dataset's")
    for name, values, end in (("candidates", rows, n_items), ("target_at", target_at, rows.shape[1])):
        if values.size and not -1 <= values.min() <= values.max() < end:
            raise DataError(f"{path}: {name} must be -1 to {end - 1}, found {values.min()} to {values.max()}")
    return Candidates(users, rows, target_at, items)
