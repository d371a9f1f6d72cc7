# SPDX-License-Identifier: Apache-2.0
"""Replay of a prepared dataset as ranking traffic: every event of the log is a request by its user at its time.

The one idea: real and invented properties are kept apart (`parameters["made_up"]` lists the invented ones).

Real: which user comes when, the length of the user's history at that moment (the events before this one, so it grows
with each return), the event's item, which is one of the candidates, and the items' popularity.

Invented:
- The other candidates: distinct items drawn by their number of events in the whole log, later events included. No log
  says what its recommender had retrieved. They are in the order drawn, with the event's item at a random position.
- Tokens. Public histories are short; as in BAT, they are stretched. All events have the same number of tokens, on top
  of `profile_tokens`: the number that brings the longest history to the longest prompt, or the mean over all requests
  to `user_tokens`. A history at the longest prompt stays at that length; a request then holds only its last events.
- Times, if the source has none (MovieLens' and Amazon's sequences, Gowalla): each user's events are spread uniformly
  at random over `hours`, in their order. Then the gaps between a user's requests say nothing about real users;
  and Gowalla's events have no order either.

KuaiRand-Pure keeps a fraction of the app's videos, so its real gaps are longer than the app's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import DataError
from jgr.data.prepared import (
    INTERACTIONS,
    ITEMS,
    Arrays,
    load_arrays,
    load_manifest,
    per_second,
    read_items,
)
from jgr.traffic.candidates import CandidateDraw, top_count
from jgr.traffic.workloads import HOUR, SECOND, Access

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_BLOCK = 512


class Replay:
    """A Trace of the events in a folder that `jgr prepare` wrote, in order of time.

    item_tokens: [n] int32, or one number for all items. hours: the time that a source without times is spread over.
    user_tokens: mean over the requests; None: the longest history has the longest prompt. Raises DataError, naming
    what does not fit.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        item_tokens: int | Int32 = 10,
        candidates: int = 100,
        hours: float | None = None,
        user_tokens: float | None = None,
        profile_tokens: int = 32,
        max_prompt: int = 8192,
        seed: int = 0,
    ) -> None:
        folder = Path(folder)
        manifest = load_manifest(folder)
        source, unit = manifest["parameters"]["source"], manifest.get("time_unit", "")
        arrays = load_arrays(folder / INTERACTIONS)
        self.name, self._seed = f"replay of {source}", seed
        n_items = len(read_items(folder / ITEMS)[0])
        self.item_tokens = np.broadcast_to(np.asarray(item_tokens, np.int32), (n_items,))
        lengths = np.diff(arrays.offsets)
        users = np.repeat(np.arange(len(lengths)), lengths)
        times = self._times(arrays, users, source, unit, hours)
        order = np.argsort(times, kind="stable")
        self._time_ns, self._users, self._items = times[order], users[order], arrays.rows[order]
        history = (np.arange(len(users)) - arrays.offsets[:-1][users])[order]
        longest = max_prompt - round(candidates * float(self.item_tokens.mean()))
        if not 1 <= profile_tokens < longest:
            raise DataError(
                f"{folder}: {max_prompt} tokens leave no room for a history beside the candidates"
            )
        self._event = _event_tokens(history, profile_tokens, longest, user_tokens)
        self._tokens = np.minimum(profile_tokens + self._event * history, longest).astype(np.int32)
        self._popularity = np.bincount(arrays.rows, minlength=n_items)
        self._candidates = CandidateDraw(self._popularity, candidates)
        self._real_times = arrays.times is not None

    def __len__(self) -> int:
        return len(self._items)

    def _times(self, arrays: Arrays, users: Int64, source: str, unit: str, hours: float | None) -> Int64:
        """The time of each event, [total] ns since the first event, ascending for each user."""
        if arrays.times is not None:
            if hours is not None:
                raise DataError(f"{source} has real times: leave hours away; accesses(speed) compresses time")
            since: Int64 = arrays.times - arrays.times.min()
            tick_ns = SECOND // per_second(arrays.times, unit)
            if int(since.max(initial=0)) > np.iinfo(np.int64).max // tick_ns:
                raise DataError(
                    f"{source}: its times span more than 292 years, which no replay can count in ns"
                )
            return since * tick_ns
        if hours is None or not 0 < hours < 1e6:
            raise DataError(
                f"{source} has no times: set hours, over which its events shall be spread at random"
            )
        drawn = np.random.default_rng((self._seed, 0)).random(len(users))
        return (drawn[np.lexsort((drawn, users))] * hours * HOUR * SECOND).astype(np.int64)

    @property
    def parameters(self) -> dict[str, Any]:
        """The skew of the real events and of the candidates, the tokens, and what is invented, as plain data."""
        top = np.sort(self._popularity)[-top_count(len(self._popularity)) :].sum()
        return {
            "events": len(self),
            "events_top10_share": float(top / self._popularity.sum()),
            "expected_top10_share": self._candidates.share(),
            "event_tokens": self._event,
            "mean_user_tokens": float(self._tokens.mean()),
            "mean_events_per_user": len(self) / len(np.unique(self._users)),
            "mean_item_tokens": float(self.item_tokens.mean()),
            "made_up": ["candidates", "tokens"] + ([] if self._real_times else ["times"]),
        }

    def accesses(self, speed: float = 1.0) -> Iterator[Access]:
        """Yield one request for each event, in order of time; see Trace."""
        rng = np.random.default_rng((self._seed, 1))
        for at in range(0, len(self), _BLOCK):
            part = slice(at, at + _BLOCK)
            targets = self._items[part]
            items = _with_targets(self._candidates.draw(len(targets), rng), targets, rng)
            times = (self._time_ns[part] / speed).astype(np.int64).tolist()
            columns = zip(times, self._users[part].tolist(), self._tokens[part].tolist(), items, strict=True)
            for time_ns, user, user_tokens, candidates in columns:
                yield Access(time_ns, user, user_tokens, candidates)


def _event_tokens(history: Int64, profile: int, longest: int, mean: float | None) -> float:
    """The tokens of an event, so that histories of so many events have the lengths that the file's docstring says."""
    if mean is None:
        return (longest - profile) / max(1, int(history.max()))
    most = float(np.where(history > 0, longest, profile).mean())
    if not profile <= mean <= most:
        raise DataError(f"user_tokens={mean}: the mean can be {profile} to {most:.0f} on this log")
    low, high = 0.0, float(longest)
    while high - low > 1e-6:
        middle = (low + high) / 2
        short = np.minimum(profile + middle * history, longest).mean() < mean
        low, high = (middle, high) if short else (low, middle)
    return high


def _with_targets(items: Int32, targets: Int32, rng: np.random.Generator) -> Int32:
    """Put each target at a random position of its line, once. If it was not drawn, it replaces the last item drawn."""
    lines = np.arange(len(targets))
    holds = items == targets[:, None]
    found = np.where(holds.any(axis=1), holds.argmax(axis=1), items.shape[1] - 1)
    places = rng.integers(0, items.shape[1], len(targets))
    items[lines, found] = items[lines, places]
    items[lines, places] = targets
    return items
