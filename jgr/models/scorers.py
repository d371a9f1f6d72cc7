# SPDX-License-Identifier: Apache-2.0
"""What a model must give to score a user's candidates in one pass: two functions, and a config by whose type they are
found.

The one idea: `read` turns a user into a state whose shapes depend on the config alone, and `score` needs that state and
the candidates. So the state may be computed once for all parts of a request, or kept between requests. Scores do not
depend on which of these was done, nor on the other candidates (MODEL-13).

What is kept of a user between requests does not depend on when the user asks, wherever the model allows that
(`keeping`); the rest is computed again for each request. Where a user's events do not depend on later ones, what is
kept can also take further events (`growing`, MODEL-14), at their cost alone.

Letters: B users, S = max_items places of a history, C contextual slots, m candidates, P tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import ConfigError
from jgr.fields import one_line
from jgr.models import checkpoint, climber, hstu, repeats, retrievers, stu_scorer, tables
from jgr.models.climber import ClimberConfig
from jgr.models.climber_layers import Build
from jgr.models.config_file import read_object, scorer_config
from jgr.models.devices import ONE, Devices, of_tables
from jgr.models.hstu import HstuConfig
from jgr.models.model_files import ModelFiles
from jgr.models.params import CheckpointError, PyTree
from jgr.models.retrievers import RetrieverConfig
from jgr.models.stu_scorer import HistoryIsWhole, StuScorerConfig
from jgr.ops import split

LEAST_WINDOW = 64
"""Below so many events a window is not divided: what a run costs besides its events is more."""
MANY = 2048
"""Fewer candidates of a user are read row by row, however small the table is."""


class Users(NamedTuple):
    """What requests say of their users. A model does not read what it has no use for.

    rows: [B, S] int32 catalog rows of the history, oldest first, -1 on the right. actions: [B, S] int32, bits of what
    was done with each. times: [B, S] int32 seconds, and now: [B], both from an origin of each user's own. context: [B,
    C] int32 values of the contextual slots, -1 for a missing one. scenario: [B] int32, where the request comes from.
    """

    rows: jax.Array
    actions: jax.Array
    times: jax.Array
    now: jax.Array
    context: jax.Array
    scenario: jax.Array


class Candidates(NamedTuple):
    """The candidates of each user. rows: [B, m] int32, -1 where there is none.

    features: by name, [B, m, width] for each feature that the config names. ages: [B, m] int32, how long ago each
    stands in its user's history, as `repeats.buckets_of` gives it; None where the model does not read it.
    """

    rows: jax.Array
    features: Mapping[str, jax.Array]
    ages: jax.Array | None = None


@dataclass(frozen=True)
class Needs:
    """What a model reads of a user and of candidates, besides the items.

    max_items: the most events of a history. tasks: the names of a candidate's scores. timed: whether events' times are
    read. dated: whether all that can be kept of a user depends on `now`, so that a kept user serves that second alone.
    actions: number of action bits. slots: number of values of each contextual slot. scenarios: number of scenarios.
    features: name and width of each feature of a candidate. repeats: whether the ages of candidates are read.
    """

    max_items: int
    tasks: tuple[str, ...] = ("score",)
    timed: bool = False
    dated: bool = False
    actions: int = 0
    slots: tuple[int, ...] = ()
    scenarios: int = 1
    features: tuple[tuple[str, int], ...] = ()
    repeats: bool = False


class Scorer(Protocol):
    """The functions of a family of scorers; cfg.items is the digest of the catalog whose rows the model embeds."""

    def spec(self, cfg: Any) -> PyTree:
        """The declaration of every parameter."""

    def needs(self, cfg: Any) -> Needs:
        """What a model of this config reads of users and candidates."""

    def read(self, params: Any, cfg: Any, users: Users) -> PyTree:
        """Compute the users' state, from which `score` scores candidates at `now`.

        Its leaves' shapes depend on cfg and B only.
        """

    def score(self, params: Any, cfg: Any, state: Any, candidates: Candidates) -> jax.Array:
        """Score the candidates, [B, m, P] float32: higher is better, and 0 where there is no candidate."""


class Keeping(Protocol):
    """How a family keeps users: what does not depend on `now`, and how a state is made of it.

    What is kept is valid for a history's first tokens, which are its slots and events; what is behind them is not read.
    """

    along: Any
    """For each leaf of what is kept, or for all below one place of it, the axis of the tokens; "number" for a leaf [B]
    int32 that is their number."""

    def begin(self, params: Any, cfg: Any, users: Users) -> PyTree:
        """What is kept of users whose events are all new."""

    def state(self, params: Any, cfg: Any, kept: Any, users: Users) -> PyTree:
        """Compute the state that `read` gives for the users, from what was kept of them at any `now`."""


class Growing(Keeping, Protocol):
    """A family whose kept users take further events."""

    def grow(self, params: Any, cfg: Any, kept: Any, users: Users, most: int) -> PyTree:
        """Compute what `begin` gives for `users`, from what was kept of them when they had fewer events.

        most: the largest number of events by which a user may have grown, at least 0.
        """


def _times(users: Users) -> jax.Array:
    """The events' times, with `now` after the last one, [B, S + 1]."""
    places, lengths = jnp.arange(users.rows.shape[1] + 1)[None], (users.rows >= 0).sum(axis=1)
    return jnp.where(places < lengths[:, None], jnp.pad(users.times, ((0, 0), (0, 1))), users.now[:, None])


def _number(rows: jax.Array) -> jax.Array:
    """How many rows [B, S] there are, [B]."""
    return (rows >= 0).sum(axis=1, dtype=jnp.int32)


def _latest(x: jax.Array, known: jax.Array, count: int, fill: int) -> jax.Array:
    """`count` values [B, count] of x [B, S], from place known [B] on; `fill` where x has ended."""
    padded = jnp.pad(x, ((0, 0), (0, count)), constant_values=fill)
    return jnp.take_along_axis(padded, known[:, None] + jnp.arange(count)[None], axis=1)


class _Retriever:
    """SASRec, LRURec and HSTU: a vector for the user, and a product with each candidate's row."""

    def spec(self, cfg: RetrieverConfig) -> PyTree:
        return retrievers.retriever(cfg).spec(cfg)

    def needs(self, cfg: RetrieverConfig) -> Needs:
        return Needs(cfg.max_items, timed=retrievers.timed(cfg), repeats=cfg.repeats)

    def read(self, params: Any, cfg: RetrieverConfig, users: Users) -> jax.Array:
        lengths = (users.rows >= 0).sum(axis=1)
        times = None
        if retrievers.timed(cfg):
            times = _times(users)
        hidden = retrievers.encode(params, cfg, users.rows, times)
        last = jnp.maximum(lengths - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    def score(self, params: Any, cfg: RetrieverConfig, state: jax.Array, candidates: Candidates) -> jax.Array:
        found = self._products(params, cfg, state, jnp.maximum(candidates.rows, 0))
        if cfg.repeats:
            if candidates.ages is None:
                raise ValueError("this model's scores depend on the candidates' ages: they must be given")
            found = found + repeats.of_candidates(params.repeats, candidates.ages)
        return jnp.where(candidates.rows >= 0, found, 0.0)[..., None]

    def _products(self, params: Any, cfg: RetrieverConfig, state: jax.Array, rows: jax.Array) -> jax.Array:
        """The products of users' vectors [B, D] with their candidates' rows [B, M], and the biases, [B, M]."""
        output = retrievers.retriever(cfg).output
        # Rows that lie anywhere in memory are read more slowly than the whole table from its begin to its end.
        if rows.shape[1] >= max(MANY, len(params.embed) // 2):
            embed, bias = output(params)
            scores = state @ embed.T
            scores = split.everywhere(scores if bias is None else scores + bias)
            return jnp.take_along_axis(scores, rows, axis=1)
        embed, bias = output(params, rows)
        found = jnp.einsum("bmd,bd->bm", embed, state)
        return found if bias is None else found + bias


class _GrowingHstu:
    """Kept: keys and values. The newest event's are computed again each time, for its bias (MODEL-12)."""

    along = (-2, -2, "number")

    def begin(self, params: Any, cfg: HstuConfig, users: Users) -> tuple[jax.Array, ...]:
        return self._kept(hstu.begin(params, cfg, users.rows, _times(users) if cfg.timed else None)[1])

    def grow(
        self, params: Any, cfg: HstuConfig, kept: tuple[jax.Array, ...], users: Users, most: int
    ) -> tuple[jax.Array, ...]:
        return self._kept(self._append(params, cfg, kept, users, most)[1])

    def state(self, params: Any, cfg: HstuConfig, kept: tuple[jax.Array, ...], users: Users) -> jax.Array:
        return self._append(params, cfg, kept, users, 0)[0]

    def _append(
        self, params: Any, cfg: HstuConfig, kept: tuple[jax.Array, ...], users: Users, most: int
    ) -> tuple[jax.Array, hstu.History]:
        k, v, known = kept
        there = jnp.arange(users.rows.shape[1])[None] < known[:, None]
        history = hstu.History(k, v, jnp.where(there, users.rows, -1), users.times)
        times = _latest(_times(users), known, most + 1, 0)
        rows = _latest(users.rows, known, most, -1)
        found: tuple[jax.Array, hstu.History] = hstu.append(params, history, rows, times, cfg=cfg)
        return found

    @staticmethod
    def _kept(history: hstu.History) -> tuple[jax.Array, ...]:
        return history.k, history.v, _number(history.rows)


class _Stu:
    """DLRMv3's HSTU."""

    def spec(self, cfg: StuScorerConfig) -> PyTree:
        return stu_scorer.spec(cfg)

    def needs(self, cfg: StuScorerConfig) -> Needs:
        dated = bool(cfg.time_rows)  # every event's input depends on how long before now it was
        return Needs(cfg.max_items, cfg.tasks, timed=True, dated=dated, actions=cfg.actions, slots=cfg.slots)

    def read(self, params: Any, cfg: StuScorerConfig, users: Users) -> stu_scorer.User:
        events = stu_scorer.Events(users.rows, users.actions, users.times)
        state: stu_scorer.User = stu_scorer.prefill(params, events, users.context, users.now, cfg=cfg)
        return state

    def score(
        self, params: Any, cfg: StuScorerConfig, state: stu_scorer.User, candidates: Candidates
    ) -> jax.Array:
        rows = candidates.rows
        found: jax.Array = stu_scorer.score(params, state, rows, cfg=cfg, micro_batch=rows.shape[1])
        return found


class _KeptStu:
    """Kept: keys and values. `now` is for the candidates alone, where events have no times."""

    along = (-2, -2, "number")

    def begin(self, params: Any, cfg: StuScorerConfig, users: Users) -> tuple[jax.Array, ...]:
        return self._kept(_Stu().read(params, cfg, users))

    def grow(
        self, params: Any, cfg: StuScorerConfig, kept: tuple[jax.Array, ...], users: Users, most: int
    ) -> tuple[jax.Array, ...]:
        user = self.state(params, cfg, kept, users)
        given = (users.rows, -1), (users.actions, 0), (users.times, 0)
        events = stu_scorer.Events(*(_latest(x, user.ends, most, fill) for x, fill in given))
        return self._kept(stu_scorer.append(params, user, events, users.now, cfg=cfg))

    def state(
        self, params: Any, cfg: StuScorerConfig, kept: tuple[jax.Array, ...], users: Users
    ) -> stu_scorer.User:
        k, v, ends = kept
        return stu_scorer.kept_user(cfg, k, v, ends, users.now)

    @staticmethod
    def _kept(user: stu_scorer.User) -> tuple[jax.Array, ...]:
        return user.past.k, user.past.v, user.ends.astype(jnp.int32)


@dataclass(frozen=True)
class _Climber:
    build: Build = "fused"

    def spec(self, cfg: ClimberConfig) -> PyTree:
        return climber.spec(cfg)

    def needs(self, cfg: ClimberConfig) -> Needs:
        features = tuple((feature.name, feature.width) for feature in cfg.features)
        return Needs(
            cfg.max_items, cfg.tasks, timed=cfg.timed, actions=cfg.actions, scenarios=cfg.scenarios,
            features=features,
        )  # fmt: skip

    def read(self, params: Any, cfg: ClimberConfig, users: Users) -> climber.User:
        return climber.read(params, cfg, _climber_events(users), build=self.build)

    def score(
        self, params: Any, cfg: ClimberConfig, state: climber.User, candidates: Candidates
    ) -> jax.Array:
        return climber.score(params, cfg, state, candidates.rows, candidates.features, build=self.build)

    def rank(self, params: Any, cfg: ClimberConfig, users: Users, candidates: Candidates) -> jax.Array:
        events = _climber_events(users)
        return climber.rank(params, cfg, events, candidates.rows, candidates.features, build=self.build)


@dataclass(frozen=True)
class _KeptClimber:
    """Kept: keys and values. The last event's of each sub-sequence are computed again each time, for its bias. A token
    is one event of each sub-sequence."""

    build: Build
    along = (-2, -2)

    def begin(self, params: Any, cfg: ClimberConfig, users: Users) -> tuple[Any, Any]:
        user = climber.read(params, cfg, _climber_events(users), build=self.build)
        return user.k, user.v

    def state(self, params: Any, cfg: ClimberConfig, kept: tuple[Any, Any], users: Users) -> climber.User:
        return climber.renew(params, cfg, *kept, _climber_events(users), build=self.build)


def _climber_events(users: Users) -> climber.Events:
    return climber.Events(users.rows, users.actions, users.times, users.now, users.scenario)


ScorerConfig = RetrieverConfig | StuScorerConfig | ClimberConfig
_SCORERS: dict[type, Scorer] = {
    **dict.fromkeys(get_args(RetrieverConfig), _Retriever()),
    StuScorerConfig: _Stu(),
    ClimberConfig: _Climber(),
}
# By train.model, which is also config.json's model_type; those of retrievers are in jgr.models.retrievers.
_TYPES: dict[str, type[StuScorerConfig | ClimberConfig]] = {
    "stu": StuScorerConfig,
    "climber": ClimberConfig,
}
MODELS = tuple(_TYPES)


def scorer(cfg: ScorerConfig, build: Build = "fused") -> Scorer:
    """The functions of the model that a config describes.

    build: how Climber's layers are run, see climber_layers.Build. Raises ConfigError for another model with another
    build than "fused".
    """
    model = _SCORERS[type(cfg)]
    if build == "fused":
        return model
    if not isinstance(model, _Climber):
        raise ConfigError(
            f"executors.build: {build} is for Climber alone; {type(cfg).__name__} is served fused"
        )
    return _Climber(build)


def as_built(params: Any, build: Build) -> Any:
    """The parameters as the functions of a build take them."""
    return climber.by_layer(params) if build == "op_by_op" else params


def rank(model: Scorer, params: Any, cfg: Any, users: Users, candidates: Candidates) -> jax.Array:
    """Score candidates from the users themselves: `read` and `score` in one program, [B, m, P] float32.

    Climber has a single pass for it (FLAME-11).
    """
    if isinstance(model, _Climber):
        return model.rank(params, cfg, users, candidates)
    return model.score(params, cfg, model.read(params, cfg, users), candidates)


def keeping(cfg: ScorerConfig, build: Build = "fused") -> Keeping | None:
    """How a scorer's users are kept where their state has as many tokens as they, or a part of it depends on `now`.

    None: what `read` gives is kept as it is, which is of one size and does not depend on `now`.
    """
    if isinstance(cfg, HstuConfig) and cfg.timed:
        return _GrowingHstu()
    if isinstance(cfg, StuScorerConfig):
        return _KeptStu()
    return _KeptClimber(build) if isinstance(cfg, ClimberConfig) else None


def growing(cfg: ScorerConfig) -> Growing:
    """How a scorer's kept users take further events. Raises HistoryIsWhole where they cannot (MODEL-14)."""
    if isinstance(cfg, HstuConfig):
        return _GrowingHstu()
    if isinstance(cfg, StuScorerConfig):
        stu_scorer.refuse_growth(cfg)
        return _KeptStu()
    raise HistoryIsWhole("only histories of HSTU and of the STU can grow; this scorer's are computed whole")


def windows(cfg: ScorerConfig, lengths: Sequence[int] = ()) -> tuple[int, ...]:
    """Numbers of events, ascending, for which the users of a family have programs: each is computed by those for the
    fewest events that hold it. The last number is the model's longest history.

    lengths: the others, of which those are left out that save nothing; empty: the half, the quarter and the eighth of
    the places that a history has in a user's state, but none below LEAST_WINDOW.
    """
    places = cfg.part if isinstance(cfg, ClimberConfig) else cfg.max_items
    halves = (places // by for by in (8, 4, 2))
    chosen = lengths or [count for count in halves if count >= LEAST_WINDOW]
    return (*sorted({count for count in chosen if count < places}), cfg.max_items)


def within(cfg: ScorerConfig, events: int) -> ScorerConfig:
    """The model for users of at most so many events: the same numbers from the same weights, in smaller arrays.

    events: one of `windows`.
    """
    if isinstance(cfg, ClimberConfig) and events < cfg.max_items:
        events *= cfg.blocks  # any block may have all of them
    return dataclasses.replace(cfg, max_items=events)


def renewing(cfg: ScorerConfig, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The rows [S] of a user's events that `Keeping.state` embeds, -1 for the others."""
    if isinstance(cfg, ClimberConfig):
        return rows
    found = np.full_like(rows, -1)
    if isinstance(cfg, HstuConfig) and (known := int((rows >= 0).sum())):
        found[known - 1] = rows[known - 1]  # the newest event's, for its bias
    return found


def save(
    folder: Path,
    cfg: ScorerConfig,
    params: PyTree,
    write_beside: Callable[[Path], None] = lambda folder: None,
    rows: str = "none",
    held: int | None = None,
) -> None:
    """A model folder: config.json, params/, and what write_beside(folder) adds. See jgr.models.checkpoint.write.

    rows, held: their type, and how many, see `tables.apart`.
    """
    if isinstance(cfg, RetrieverConfig):
        return retrievers.save(folder, cfg, params, write_beside, rows, held)
    params, write_beside = tables.apart(cfg, params, rows, write_beside, held)
    model_type = next(name for name, of in _TYPES.items() if of is type(cfg))
    checkpoint.write(folder, {"model_type": model_type, **dataclasses.asdict(cfg)}, params, write_beside)


def load(
    folder: Path, files: ModelFiles | None = None, devices: Devices = ONE, paged: bool = False
) -> tuple[ScorerConfig, PyTree]:
    """Read the folder that `save` wrote, of any family: config and parameters. files, devices: see checkpoint.load.
    paged: leave embeddings in the folder's tables, of which it must have the items'.

    Raises CheckpointError; ConfigError for a family that several devices cannot share.
    """
    files = files or ModelFiles(folder)
    require_size(folder, files)
    files.check()
    cfg = load_config(folder)
    if devices.count > 1 and not isinstance(cfg, RetrieverConfig):
        raise ConfigError(
            f"model.tensor_parallel: {devices.count}, but a model of {type(cfg).__name__.removesuffix('Config')} is "
            "served on one device; of scorers, SASRec, LRURec and HSTU can be shared, by their items"
        )
    specs, placement = scorer(cfg).spec(cfg), of_tables(devices)
    if paged and tables.ITEMS not in tables.there(folder, cfg):
        raise ConfigError(
            f"embeddings.tables: paged, but {folder} has no {tables.path_of(tables.ITEMS)}; train it with "
            "train.tables=float32, or convert it with --tables=float32"
        )
    params = checkpoint.restore(folder, tables.declared(folder, cfg, specs), placement=placement)
    return cfg, params if paged else tables.joined(folder, cfg, specs, params, files, placement)


def require_size(folder: Path, files: ModelFiles) -> None:
    """Refuse a scorer's folder whose files are too large, see checkpoint.require_size."""
    files.check_sizes()
    cfg = load_config(folder)
    tables.require_size(folder, cfg, scorer(cfg).spec(cfg), files)


def load_config(folder: Path) -> ScorerConfig:
    """Read the config alone of the folder that `save` wrote. Raises CheckpointError."""
    path = folder / "config.json"
    raw = read_object(path)
    if raw.get("model_type") in retrievers.MODELS:
        return retrievers.load_config(folder)
    try:
        return scorer_config(raw, _TYPES)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: is not the config of a scorer that jgr trained: {one_line(error)}"
        ) from None
