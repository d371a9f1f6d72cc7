# SPDX-License-Identifier: Apache-2.0
"""A library of prototypes as an engine serves with it (RCLLM-2..4, 9): the search for tokens of reviews, in threads
beside the event loop, and the copy of its keys and values into the pool.
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.pool import PoolLost
from jgr.config import CacheConfig, Config, ConfigError
from jgr.extras import require
from jgr.library.embeddings import TokenEmbeddings
from jgr.library.folder import LibraryFolder, identity
from jgr.library.prototypes import Prototypes
from jgr.models import checkpoint
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.kv import ContextKV
from jgr.models.model_files import ModelFiles
from jgr.models.packed import KVCells
from jgr.models.quantize import versioned
from jgr.prompt.tokens import Tokenizer, template_prefix
from jgr.serving.engine.opening import open_folder
from jgr.serving.policies.prototypes import Placed
from jgr.serving.policies.sources import Near, Run, part_of

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class Found(NamedTuple):
    """For each token of a review the number of its nearest prototype, -1: none is near, and their cosine, [t]."""

    prototypes: Int64
    cosines: Float32


class Library:
    """A folder that belongs to a model, and its search. Raises UserError as LibraryFolder, and where jgr[library] is
    not installed."""

    def __init__(
        self, cache: CacheConfig, params: DecoderParams, cfg: DecoderConfig, revision: str, prefix: Int32
    ) -> None:
        require("library", "cache.library")
        from jgr.library.finder import Finder

        dtype = np.dtype(params.embed.dtype).name
        of = identity(revision, dtype, (cfg.layers, cfg.kv_heads, cfg.head_dim), prefix)
        self.folder, self._least = LibraryFolder(Path(cache.library), of), cache.library_cosine
        self._share = cache.library_share
        if not len(self.folder):
            raise ConfigError(f"cache.library: {cache.library} has no prototypes")
        self.prototypes: Prototypes = self.folder.prototypes
        embeddings = TokenEmbeddings(np.asarray(params.embed), cfg.rope_theta)
        self._finder = Finder(self.prototypes, embeddings, self.folder.about.search)
        self.dtype = np.dtype(params.embed.dtype)

    def __len__(self) -> int:
        return len(self.folder)

    def find(self, review: Int32) -> Found:
        """What stands for a review's tokens, [t] int32."""
        numbers, cosines = self._finder.find(review)
        return Found(np.where(cosines >= self._least - 1e-6, numbers, -1), cosines)

    def near(self, found: Found, share: float, budget: float | None = None) -> Near:
        """Which tokens of a history take a prototype's keys and values.

        found: of all tokens of the history, -1 beside reviews. share: of the items' tokens, which holds for those with
        a prototype too unless cache.library_share is set; so many are computed all the same, the farthest first
        (RCLLM-10 by the divergence alone, RCLLM-11). budget: the request's own share, which goes before both.
        """
        own = share if self._share is None else self._share
        share = own if budget is None else budget
        numbers = found.prototypes.copy()
        have = np.flatnonzero(numbers >= 0)
        selected = part_of(share, len(have))
        farthest = have[np.lexsort((have, found.cosines[have]))[:selected]]
        numbers[farthest] = -1
        return Near(tuple(self._runs(numbers)), selected)

    def _runs(self, numbers: Int64) -> list[Run]:
        """Consecutive tokens whose prototypes stand side by side in one review are one run."""
        at = np.flatnonzero(numbers >= 0)
        if not len(at):
            return []
        of = numbers[at]
        reviews, places = self.prototypes.reviews[of], self.prototypes.places[of]
        columns = np.stack([at, of, places])
        goes_on = (np.diff(columns) == 1).all(axis=0) & (np.diff(reviews) == 0)
        first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        lengths = np.diff(np.append(first, len(at)))
        rows = zip(at[first], lengths, of[first], places[first], strict=True)
        return [Run(*map(int, row)) for row in rows]


class LibraryLoader:
    """Fills the cells that a plan was given for the library, before that plan's programs are dispatched.

    `plan` is called on the event loop, `catch_up` by every thread that is about to dispatch. kv: of the cells.
    prototypes: their number.
    """

    def __init__(self, library: Library, kv: KVCells) -> None:
        self.library, self._kv, self.prototypes = library, kv, len(library)
        self._planned: deque[Placed] = deque()
        self._lock = threading.Lock()

    def plan(self, placed: list[Placed]) -> None:
        """Queue cells that are to be filled."""
        self._planned.extend(placed)

    def catch_up(self, executor: Any) -> None:
        """Fill all that is queued. executor: the PagedExecutor that dispatches. Raises what that raises; what was to be
        filled stays queued then."""
        with self._lock:  # even where nothing is queued: another thread may be about to fill the last cells
            while self._planned:
                placed = self._planned.popleft()
                try:
                    self._fill(placed, executor)
                except PoolLost:  # it is placed anew by the next plan
                    continue
                except Exception:
                    self._planned.appendleft(placed)  # else its cells would be read as they are
                    raise

    def _fill(self, placed: Placed, executor: Any) -> None:
        kv, library = self._kv, self.library
        cells = np.array(placed.cells, np.int32).reshape(-1, kv.parts)
        most = executor.written_at_once
        for at in range(0, len(library), most):
            numbers = np.arange(at, min(at + most, len(library)))
            slots = cells[numbers // kv.tokens] * kv.tokens + (numbers % kv.tokens)[:, None]
            values = np.ascontiguousarray(library.folder.kv[at : at + most]).view(library.dtype)
            k, v = (x[:, None] for x in values.transpose(2, 1, 3, 0, 4))  # [L, 1, K, n, d]
            # A negative number of positions back is as many on: to where the token stands in its own review.
            shift = -library.prototypes.places[numbers].astype(np.int32)
            executor.put(ContextKV(k, v), slots.astype(np.int32), shift, placed.epoch)


class LibraryModel(NamedTuple):
    """What a library is made with. prefix: [t], the prompt's tokens before the history."""

    params: DecoderParams
    cfg: DecoderConfig
    tokenizer: Tokenizer
    revision: str
    prefix: Int32


def library_model(config: Config) -> LibraryModel:
    """The model of a configuration. UserError where there is none, or none that takes a library."""
    folder = open_folder(config)
    files = ModelFiles(folder)
    dtype = checkpoint.served_dtype(folder, config.model.dtype)
    cfg, params = checkpoint.load(folder, dtype, files, kind=config.model.quantize)
    if not isinstance(cfg, DecoderConfig) or not isinstance(params, DecoderParams):
        raise ConfigError(f"{folder}: a model of family {cfg.family} takes no library")
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    return LibraryModel(
        params,
        cfg,
        tokenizer,
        versioned(files.revision(), config.model.quantize),
        template_prefix(config.prompt, tokenizer),
    )
