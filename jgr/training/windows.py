# SPDX-License-Identifier: Apache-2.0
"""Training windows, and which of them make the batch of each step.

The batch of step s is a pure function of (data, seed, s), so a resumed run needs no state of its input pipeline. Grain
only reads ahead. A window of a user's sequence is up to max_items + 1 consecutive items: every item after the first is
a target. Users of similar length share a batch, so that it has little padding.

With train.times a window holds rows and times, which are seconds since its first event.

Letters: B batch, N max_items.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jgr.config import ConfigError, TrainConfig
from jgr.data.interactions import Ragged, refuse_long

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

SORTED_TOGETHER = 8
"""Users are sorted by length among this many batches; more would save more padding, but make batches less random."""
WIDTHS = 4
"""The most different widths of batches; each needs a compiled training program."""
READ_AHEAD = 4
"""How many batches are read ahead."""


class Batches(ABC):
    """The batches of one training set. sizes: the length of each example; examples of similar length share a batch."""

    def __init__(self, train: TrainConfig, sizes: Int64) -> None:
        self._train, self._sizes = train, sizes
        self._epoch_order = functools.lru_cache(maxsize=2)(self._draw_order)

    def __len__(self) -> int:
        return len(self._sizes)

    def steps_per_epoch(self) -> int:
        return -(-len(self) // self._train.batch)

    @abstractmethod
    def digest(self) -> str:
        """The first 16 hex digits of a sha256 over the data: equal data have equal digests."""

    @abstractmethod
    def batch(self, step: int) -> Int32:
        """The windows of a step, [B, ...]."""

    def batches(self, start: int) -> Iterator[Int32]:
        """The batches of steps start, start + 1, ... up to train.steps, read ahead by Grain."""
        import grain  # 2 s of import time

        rest = grain.MapDataset.range(start, self._train.steps).map(self.batch)
        # One thread keeps the order of what it computes; a batch costs far less than a step.
        return iter(rest.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)))

    def _place(self, step: int) -> tuple[int, int, Int64]:
        """A step's epoch, its position in the epoch, and its B examples."""
        epoch, position = divmod(step, self.steps_per_epoch())
        return epoch, position, self._epoch_order(epoch)[position]

    def _draw_order(self, epoch: int) -> Int64:
        """The examples of an epoch, [steps per epoch, B]: each once; the last batch is filled up from the front."""
        rng = np.random.default_rng((self._train.seed, epoch))
        steps, size = self.steps_per_epoch(), self._train.batch
        order = np.resize(rng.permutation(len(self)), steps * size)
        for at in range(0, len(order), SORTED_TOGETHER * size):
            group = order[at : at + SORTED_TOGETHER * size]
            group[:] = group[np.argsort(self._sizes[group], kind="stable")]
        return rng.permutation(order.reshape(steps, size))


class Windows(Batches):
    """Batches of item sequences. Users with fewer than two items have no target and are left out.

    sequences: each user's catalog rows in time order.
    """

    def __init__(self, sequences: Ragged, train: TrainConfig) -> None:
        self._sequences = sequences.select(np.flatnonzero(sequences.lengths >= 2))
        if not len(self._sequences):
            raise ConfigError("no user has two interactions: there is nothing to learn from")
        if train.times:
            times = sequences.times
            if times is None:
                raise ConfigError("train.times: the dataset has no times")
            # Of whole histories: no window is longer.
            spans = times[self._sequences.stops - 1] - times[self._sequences.starts]
            refuse_long(spans, "train.times", ConfigError)
        super().__init__(train, np.minimum(self._sequences.lengths, train.max_items + 1))

    def digest(self) -> str:
        """The hash of the sequences; see Batches."""
        digest = hashlib.sha256()
        for sequence in self._sequences:
            digest.update(len(sequence).to_bytes(8, "little") + sequence.tobytes())
        if self._train.times:
            for i in range(len(self)):
                digest.update(self._sequences.times_of(i).tobytes())
        return digest.hexdigest()[:16]

    def batch(self, step: int) -> Int32:
        """The windows of a step, [B, n <= N + 1] rows, -1 on the right of shorter windows; [B, n, 2] with train.times.

        A sequence that is longer than a window gives another window in every epoch; with train.skip_events, any does.
        """
        epoch, position, users = self._place(step)
        rng = np.random.default_rng((self._train.seed, epoch, position))
        fractions = rng.random(len(users))
        longest = self._train.max_items + 1
        quantum = -(-longest // WIDTHS)
        width = min(-(-int(self._sizes[users].max()) // quantum) * quantum, longest)
        rows = np.full((len(users), width), -1, np.int32)
        times = np.zeros_like(rows)
        for i, (user, fraction) in enumerate(zip(users, fractions, strict=True)):
            sequence, size = self._sequences[user], self._sizes[user]
            start = int(fraction * (len(sequence) - size + 1))
            rows[i, :size] = sequence[start : start + size]
            if self._train.times:
                happened = self._sequences.times_of(user)[start : start + size]
                times[i, :size] = happened - happened[0]
        if self._train.skip_events:
            rows, times = _thinned(rows, times, rng.random(rows.shape), self._train.skip_events)
        return np.stack([rows, times], axis=-1) if self._train.times else rows


def _thinned(rows: Int32, times: Int32, drawn: npt.NDArray[np.float64], share: float) -> tuple[Int32, Int32]:
    """Windows [B, n] and their times without the events whose number, drawn from [0, 1), is below `share`; the two of
    the largest numbers stay."""
    drawn = np.where(rows >= 0, drawn, -1.0)
    np.put_along_axis(drawn, np.argpartition(-drawn, 1, axis=1)[:, :2], 1.0, axis=1)
    gone = drawn < share
    order = np.argsort(gone, axis=1, kind="stable")
    rows = np.take_along_axis(np.where(gone, -1, rows), order, axis=1).astype(np.int32)
    times = np.take_along_axis(times, order, axis=1)
    return rows, np.where(rows >= 0, times - times[:, :1], 0).astype(np.int32)
