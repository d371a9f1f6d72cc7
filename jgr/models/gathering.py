# SPDX-License-Identifier: Apache-2.0
"""What a run of a scorer is given of tables that are not among its parameters, and how its program names it (HLEM-1).

The one idea: a run gets an array for each table, with the rows that it reads in an order that both sides know, and the
model's functions are told the places in it for the ids. So the program is the same as with whole tables, and the host
alone looks ids up. A run has one user, or none, and candidates, or none:

    items       the user's events, then the candidates
    slots       the value of each slot
    a feature   an empty row, which stands for no category, then each candidate's categories
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.models import scorers, tables
from jgr.models.climber import ClimberConfig
from jgr.models.params import PyTree
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.models.stu_scorer import StuScorerConfig

Int32 = npt.NDArray[np.int32]
NONE = np.zeros(0, np.int32)


class Gathering:
    """names: of the tables. Rows, places and counts are of one run, which reads so many `events` of a user and has
    places for `size` candidates."""

    def __init__(self, cfg: ScorerConfig, names: tuple[str, ...]) -> None:
        self.names, self._cfg = names, cfg
        self._specs = scorers.scorer(cfg).spec(cfg)
        self._slots = np.array(cfg.slots if isinstance(cfg, StuScorerConfig) else (), np.int32)
        features = cfg.features if isinstance(cfg, ClimberConfig) else ()
        self._features = {
            tables.FEATURE + of.name: of for of in features if tables.FEATURE + of.name in names
        }

    def counts(self, events: int, size: int) -> dict[str, int]:
        """How many rows of each table a run is given."""
        found = {tables.ITEMS: events + size, tables.SLOTS: len(self._slots)}
        found |= {name: 1 + size * of.width for name, of in self._features.items()}
        return {name: found[name] for name in self.names}

    def shaped(self, params: PyTree, events: int, size: int) -> PyTree:
        """The parameters, with the shapes of what a run is given in the tables' place."""
        counts = self.counts(events, size)
        return tables.replaced(
            params, {name: tables.shape(self._specs, name, counts[name]) for name in counts}
        )

    def rows(
        self,
        user: Mapping[str, Any] | None,
        events: int,
        candidates: Int32 = NONE,
        records: npt.NDArray[np.void] | None = None,
        size: int = 0,
        renews: bool = False,
    ) -> dict[str, Int32]:
        """The rows of each table that a run is given, -1 for none.

        user: the arrays of its block, see `user_block`. candidates [c <= size]; records [c]: of their features; None:
        they have none. renews: see `scorers.renewing`.
        """
        found = dict[str, Int32]()
        for name, count in self.counts(0 if user is None else events, size).items():
            rows = found[name] = np.full(count, -1, np.int32)
            if name == tables.ITEMS:
                if user is not None:
                    history = user["rows"][:events]
                    rows[:events] = scorers.renewing(self._cfg, history) if renews else history
                rows[count - size : count - size + len(candidates)] = candidates
            elif name == tables.SLOTS:
                if user is not None and not renews:
                    values = user["context"]
                    first = np.cumsum(self._slots) - self._slots
                    rows[:] = np.where(values >= 0, first + values, -1)
            elif records is not None:
                feature = self._features[name]
                categories = records[feature.name].reshape(-1).astype(np.int64)
                rows[1 : 1 + len(categories)] = np.where(categories > 0, categories % feature.rows, -1)
        return found

    # What programs call.

    def model(self, cfg: ScorerConfig, size: int) -> ScorerConfig:
        """The model whose tables have the rows of a run alone."""
        if isinstance(cfg, ClimberConfig):
            features = (
                of._replace(rows=1 + size * of.width) if tables.FEATURE + of.name in self.names else of
                for of in cfg.features
            )
            return dataclasses.replace(cfg, features=tuple(features))
        if isinstance(cfg, StuScorerConfig) and tables.SLOTS in self.names:
            return dataclasses.replace(cfg, slots=(1,) * len(cfg.slots))
        return cfg

    def users(self, users: Users) -> Users:
        """The users with each event's row named by its place [0, S), and each slot's value by its only row."""
        places = jnp.broadcast_to(jnp.arange(users.rows.shape[1], dtype=jnp.int32), users.rows.shape)
        users = users._replace(rows=jnp.where(users.rows >= 0, places, -1))
        if tables.SLOTS in self.names:
            users = users._replace(context=jnp.minimum(users.context, 0))
        return users

    def candidates(self, asked: Candidates, events: int) -> Candidates:
        """The candidates [1, m] with their rows and categories named by places, behind so many events."""
        rows, features = asked.rows, dict(asked.features)
        places = events + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
        for of in self._features.values():
            given = features.get(of.name)
            if given is not None and jnp.issubdtype(given.dtype, jnp.integer):  # else the model refuses them
                own = 1 + jnp.arange(given[0].size, dtype=jnp.int32).reshape(given.shape)
                features[of.name] = jnp.where(given > 0, own, 0)
        return asked._replace(rows=jnp.where(rows >= 0, places, -1), features=features)
