# SPDX-License-Identifier: Apache-2.0
"""Climber, FLAME's scorer (MODEL-18, as reconstructed in MODEL-19): each part of the history has a block of layers.

    sub-sequences  N_b parts of the history, each before the candidate, each through a stack of layers of its own
    per layer      h += softmax((q k^T + bias_k,r) / temperature_k,r) v W_o;   h += W_down gelu(W_up norm(h))
    fusion         F = E + attention over the blocks of norm(E);  z = sum_k sigmoid(gate(vec(F)))_k * F_k
    score of t     sigmoid(tower_t(sum_e softmax(G_t z)_e expert_e(z)))

k is the block, r the scenario of the request, E [N_b, D] the candidate's vector at the end of each block. The bias
is of positions and times (MODEL-7), one table for each block and one to add for each scenario in it. Every candidate
stands where the next event would, and sees a part's history and itself: scores depend on no other candidate, and the
history's keys and values are computed once, by `read` (MODEL-14 with C = 0, and M-FALCON's MODEL-13).

A candidate is its item, its features, a vector of the scenario and one of the user's habits: how often each action was
among the events. These two are not in MODEL-19. Scenarios differ in how often anything is clicked at all, which bias
and temperature cannot express, least of all without a history. Users differ in that too, and it takes more events than
a block has to tell how.

How events are divided: with `behaviours`, block k has the latest events whose action has one of the block's bits.
Without them, block 0 has the latest S / N_b events, block 1 those before them, and so on: short-term and
long-term interest; a short history leaves the later blocks to the candidate alone.

Letters: B users, S = max_items, s = S / N_b places of a part, m candidates, L layers of a block, D hidden, H heads of
h = D / H, F width of an MLP, R scenarios, X experts, P tasks. A group is a block of a user: G = N_b B of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.config import UserError
from jgr.models.climber_heads import Fusion, Heads, fuse, tasks
from jgr.models.climber_layers import Build, all_layers, candidate_layers, history_layers, layer_spec
from jgr.models.hstu import BUCKETS
from jgr.models.params import Spec
from jgr.ops.biased_attention import Bias, Places, spread

_TEMPERATURE_WIDTH = 16
_PRIOR = 20  # events of unknown action added to each user's, so that few events say little
_ONE = math.log(math.e - 1)
"""The x with softplus(x) = 1, so that temperatures start at that of plain attention."""


class Feature(NamedTuple):
    """A feature of items: `width` numbers or categories.

    rows: how many rows the categories' embedding table has; 0: the values are numbers.
    """

    name: str
    width: int
    rows: int = 0


@dataclass(frozen=True)
class ClimberConfig:
    """Architecture only.

    items: digest of the catalog whose rows the model embeds. max_items: S, a multiple of blocks. mlp: F. tasks: names
    of the outcomes that scores are probabilities of. timed: whether the bias depends on times. actions: number of
    action bits. behaviours: for each block the action bits of which an event must have one to be in its part, 0 for
    all events; empty: parts are divided by the events' age.
    """

    n_items: int
    max_items: int
    blocks: int
    layers: int
    hidden: int
    heads: int
    mlp: int
    tasks: tuple[str, ...]
    items: str
    experts: int = 4
    scenarios: int = 1
    timed: bool = True
    actions: int = 0
    behaviours: tuple[int, ...] = ()
    features: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tasks", "behaviours"):  # lists, where they come from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "features", tuple(Feature(*x) for x in self.features))
        for feature in self.features:  # whose tables' files are named after them
            if not feature.name or set("/\0") & set(feature.name):
                raise ValueError(f"features: {feature.name!r} cannot be a feature's name")
        for name, what in (("max_items", "blocks"), ("hidden", "heads")):
            if getattr(self, name) % getattr(self, what):
                raise ValueError(
                    f"{name} {getattr(self, name)} is no multiple of {what} {getattr(self, what)}"
                )
        if self.behaviours and len(self.behaviours) != self.blocks:
            raise ValueError(f"{len(self.behaviours)} behaviours, and {self.blocks} blocks")
        if max(self.behaviours, default=0) >> self.actions:
            raise ValueError(
                f"behaviours {self.behaviours} ask for more than {self.actions} bits of an action"
            )

    @property
    def part(self) -> int:
        """The number of places s that a block's part has."""
        return self.max_items // self.blocks


BASE = ClimberConfig(
    n_items=100_000, max_items=512, blocks=2, layers=12, hidden=128, heads=4, mlp=128,
    tasks=("click", "like", "finish"), items="", scenarios=4,
)  # fmt: skip
LONG = ClimberConfig(**{**vars(BASE), "max_items": 1024})
"""FLAME's `base`, with 128 candidates, and `long`, with 512; its width and MLP, unpublished, are MODEL-19's."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bases:
    """Tables of the attention's bias, one for each block (MODEL-7).

    positions: by how many places back the key is, 0 to s. times: by the time between key and query; None without times.
    of_positions, of_times: what each scenario adds to them.
    """

    positions: Any  # [N_b, s + 1]: by how many places back a key is
    of_positions: Any  # [N_b, R, s + 1]: added in each scenario
    times: Any  # [N_b, BUCKETS]: by the time between
    of_times: Any  # [N_b, R, BUCKETS]: added in each scenario


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Temperature:
    """The network f_tc that gives a block's temperature in a scenario, from a row for each of the two."""

    blocks: Any  # [N_b, 16]: a row for each block
    scenarios: Any  # [R, 16]: a row for each scenario
    w1: Any  # [32, 16]: first matrix, of both rows side by side
    w2: Any  # [16]: second matrix
    bias: Any  # []: of the result


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ClimberParams:
    """The weights of a Climber. layers: see `Layer`.

    features: by name, for each feature a matrix [width, D] for numbers, or a table [rows, D] for categories.
    """

    embed: Any  # [n_items, D]: a row for each item
    actions: Any  # [actions, D]: a row for each action bit; None where actions are not read
    question: Any  # [R, D]: a row for each scenario, added to the candidates
    habits: Any  # [actions + 1, D]: rows for the shares of actions; the last: none is known. None: actions are not read
    features: dict[str, Any]
    bases: Bases
    temperature: Temperature
    layers: Any
    fusion: Fusion
    heads: Heads


class User(NamedTuple):
    """The users' state, made by `read`: all that `score` reads of them and their history.

    k, v: [L, G, H, s, h], the history's keys and values; in the build op_by_op tuples of L. lengths: [G] int32, events
    of each group. bias: [G, 1, 1, s + 1] float32, a candidate's to each event, and to itself. scale: [G] float32,
    1 / temperature. question: [B, D], what scenario and habits add to a candidate.
    """

    k: Any
    v: Any
    lengths: jax.Array
    bias: jax.Array
    scale: jax.Array
    question: jax.Array


def spec(cfg: ClimberConfig) -> ClimberParams:
    """The declaration of every parameter."""
    hidden, blocks, wide = cfg.hidden, cfg.blocks, _TEMPERATURE_WIDTH
    inner, experts, tasks = cfg.mlp, cfg.experts, len(cfg.tasks)

    def table(*shape: int) -> Spec:
        return Spec(shape, ("rows",) * (len(shape) - 1) + ("embed",))

    def matrix(*shape: int) -> Spec:
        """The last but one dimension is summed over."""
        return Spec(shape, ("blocks",) * (len(shape) - 2) + ("embed", "mlp"), fan_in=shape[-2])

    def zeros(*shape: int) -> Spec:
        return Spec(shape, ("rows",) * len(shape), "zeros")

    def offsets(entries: int) -> Spec:
        return zeros(blocks, cfg.scenarios, entries)

    reach = cfg.part + 1
    return ClimberParams(
        embed=table(cfg.n_items, hidden),
        actions=table(cfg.actions, hidden) if cfg.actions else None,
        question=zeros(cfg.scenarios, hidden),
        habits=zeros(cfg.actions + 1, hidden) if cfg.actions else None,
        features={f.name: table(f.rows or f.width, hidden) for f in cfg.features},
        bases=Bases(
            table(blocks, reach),
            offsets(reach),
            table(blocks, BUCKETS) if cfg.timed else None,
            offsets(BUCKETS) if cfg.timed else None,
        ),
        temperature=Temperature(
            table(blocks, wide), table(cfg.scenarios, wide), matrix(2 * wide, wide), table(wide), zeros()
        ),
        layers=layer_spec(cfg.layers, blocks, hidden, inner),
        fusion=Fusion(
            zeros(2, hidden),
            matrix(hidden, 3 * hidden),
            matrix(hidden, hidden),
            Spec((blocks, hidden, hidden), ("blocks", "embed", "mlp"), fan_in=blocks * hidden),
            matrix(blocks, hidden, hidden),
        ),
        heads=Heads(
            matrix(experts, hidden, inner),
            zeros(experts, inner),
            matrix(experts, inner, hidden),
            matrix(tasks, hidden, experts),
            matrix(tasks, hidden, hidden),
            zeros(tasks, hidden),
            Spec((tasks, hidden), ("tasks", "embed"), fan_in=hidden),
            zeros(tasks),
        ),
    )


def by_layer(params: ClimberParams) -> ClimberParams:
    """Split the layers' weights into a tuple of layers, as the build op_by_op needs them."""
    layers = len(params.layers.qkv)
    apart = tuple(jax.tree.map(lambda x, at=at: x[at], params.layers) for at in range(layers))
    return replace(params, layers=apart)


class _Parts(NamedTuple):
    """The sub-sequences: [N_b, B, s] int32, oldest first, -1 on the right in rows."""

    rows: jax.Array
    actions: jax.Array
    times: jax.Array


def _divide(cfg: ClimberConfig, rows: jax.Array, actions: jax.Array, times: jax.Array) -> _Parts:
    """Divide events, [B, S] each, into the blocks' parts: the latest s of a block's behaviour, or of its age."""
    batch, count = rows.shape
    block, there = jnp.arange(cfg.blocks)[:, None, None], rows >= 0
    if cfg.behaviours:
        bits = jnp.asarray(cfg.behaviours, jnp.int32)[:, None, None]
        own = there & ((bits == 0) | ((actions & bits) != 0))
    else:
        later = there.sum(axis=1, keepdims=True) - 1 - jnp.arange(count)
        own = there & (later // cfg.part == block)
    numbers = jnp.cumsum(own, axis=2)
    place = numbers - 1 - jnp.maximum(numbers[..., -1:] - cfg.part, 0)
    place = jnp.where(own & (place >= 0), place, cfg.part)  # out of bounds: not stored
    user = jnp.arange(batch)[None, :, None]

    def stored(x: jax.Array, otherwise: int) -> jax.Array:
        empty = jnp.full((cfg.blocks, batch, cfg.part), otherwise, jnp.int32)
        return empty.at[block, user, place].set(jnp.broadcast_to(x, own.shape), mode="drop")

    return _Parts(stored(rows, -1), stored(actions, 0), stored(times, 0))


def _habits(params: ClimberParams, cfg: ClimberConfig, rows: jax.Array, actions: jax.Array) -> jax.Array:
    """The vector [B, D] of each user's habits, from rows and actions [B, S] of `Events`."""
    there = (rows >= 0)[..., None]
    done = jnp.where(there, (actions[..., None] >> jnp.arange(cfg.actions)) & 1, 0).sum(axis=1)
    counts = jnp.concatenate([done, jnp.full_like(done[:, :1], _PRIOR)], axis=1)
    found: jax.Array = (counts / (there.sum(axis=1) + _PRIOR)).astype(params.habits.dtype) @ params.habits
    return found


def _events(params: ClimberParams, cfg: ClimberConfig, rows: jax.Array, actions: jax.Array) -> jax.Array:
    """The vectors [..., D] of events; those of padding have no effect."""
    x = params.embed[jnp.maximum(rows, 0)]
    if cfg.actions:
        bits = (actions[..., None] >> jnp.arange(cfg.actions)) & 1
        x = x + bits.astype(x.dtype) @ params.actions
    embedded: jax.Array = x * cfg.hidden**0.5
    return embedded


def _asked(
    params: ClimberParams,
    cfg: ClimberConfig,
    question: jax.Array,
    rows: jax.Array,
    features: Mapping[str, jax.Array],
) -> jax.Array:
    """The candidates' vectors [N_b, B, m, D]. A feature that is 0 or not given adds nothing.

    Raises UserError for categories that are not whole numbers.
    """
    x = params.embed[jnp.maximum(rows, 0)] + question[:, None]
    for feature in cfg.features:
        if feature.name not in features:
            continue
        given, table = features[feature.name], params.features[feature.name]
        if feature.rows and not jnp.issubdtype(given.dtype, jnp.integer):
            raise UserError(
                f"features: the model reads {feature.name} as categories, whole numbers, and is given {given.dtype}"
            )
        if feature.rows:
            given = given.astype(jnp.int32)  # in 8 bits the number of rows would be another one
            found = jnp.where((given > 0)[..., None], table[given % feature.rows], 0)
            x = x + found.sum(axis=2)
        else:  # prices and counts span orders of magnitude
            given = given.astype(jnp.float32)
            x = x + (jnp.sign(given) * jnp.log1p(jnp.abs(given))).astype(x.dtype) @ table
    return jnp.broadcast_to(x * cfg.hidden**0.5, (cfg.blocks, *x.shape))


def _tables(bases: Bases, scenario: jax.Array) -> Bias:
    """The bias tables as the op takes them, [G, 1, entries]; entries of later keys are never read."""
    near = bases.positions[:, None] + bases.of_positions[:, scenario]
    both = jnp.concatenate([near[..., ::-1], jnp.zeros_like(near[..., 1:])], axis=-1)
    times = None if bases.times is None else bases.times[:, None] + bases.of_times[:, scenario]
    return Bias(*(None if x is None else x.reshape(-1, 1, x.shape[-1]) for x in (both, times)))  # type: ignore[arg-type]


def _scale(weights: Temperature, cfg: ClimberConfig, scenario: jax.Array) -> jax.Array:
    """[G] float32: 1 / temperature."""
    batch = scenario.shape[0]
    blocks = jnp.broadcast_to(weights.blocks[:, None], (cfg.blocks, batch, _TEMPERATURE_WIDTH))
    both = jnp.concatenate([blocks, jnp.broadcast_to(weights.scenarios[scenario], blocks.shape)], axis=-1)
    inner = jax.nn.relu(both.astype(jnp.float32) @ weights.w1.astype(jnp.float32))
    factor = jax.nn.softplus(inner @ weights.w2.astype(jnp.float32) + weights.bias + _ONE)
    scale: jax.Array = (1 / ((cfg.hidden // cfg.heads) ** 0.5 * factor)).reshape(-1)
    return scale


class Events(NamedTuple):
    """Users' events: rows [B, S], oldest first, -1 on the right; actions [B, S] bits; times [B, S] and now [B], seconds
    from an origin of each user's own; scenario [B]. All int32; fields that the config does not use are not read."""

    rows: jax.Array
    actions: jax.Array
    times: jax.Array
    now: jax.Array
    scenario: jax.Array


class Prepared(NamedTuple):
    """The layers' inputs: x [N_b, B, s, D]; lengths, scale [G]; bias [G, 1, s, s], of_candidates [G, 1, 1, s + 1];
    question [B, D]."""

    x: jax.Array
    lengths: jax.Array
    bias: jax.Array
    of_candidates: jax.Array
    scale: jax.Array
    question: jax.Array


def prepare(params: ClimberParams, cfg: ClimberConfig, events: Events) -> Prepared:
    """Compute the layers' inputs, all that does not depend on a layer."""
    parts, lengths = _groups(cfg, events)
    happened, following, asked = _places(cfg, parts, lengths, events.now)
    scenario = jnp.clip(events.scenario, 0, cfg.scenarios - 1)
    tables = _tables(params.bases, scenario)
    habits = _habits(params, cfg, events.rows, events.actions) if cfg.actions else 0
    return Prepared(
        _events(params, cfg, parts.rows, parts.actions),
        lengths,
        spread(tables, following, happened),
        spread(tables, asked, _with(happened, asked)),
        _scale(params.temperature, cfg, scenario),
        params.question[scenario] + habits,
    )


def _groups(cfg: ClimberConfig, events: Events) -> tuple[_Parts, jax.Array]:
    """The sub-sequences, and how many events each has, [G] int32."""
    rows = events.rows
    parts = _divide(cfg, rows, events.actions if cfg.actions else rows, events.times if cfg.timed else rows)
    return parts, (parts.rows >= 0).sum(axis=2, dtype=jnp.int32).reshape(-1)


def _with(places: Places, others: Places) -> Places:
    both: Places = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), places, others)
    return both


def read(params: ClimberParams, cfg: ClimberConfig, events: Events, *, build: Build = "fused") -> User:
    """Compute the users' state, from which `score` scores candidates at the time `now`. build: see `Build`."""
    given = prepare(params, cfg, events)
    k, v = history_layers(build, params.layers, given.x, cfg.heads, given.lengths, given.bias, given.scale)
    return User(k, v, given.lengths, given.of_candidates, given.scale, given.question)


def renew(
    params: ClimberParams, cfg: ClimberConfig, k: Any, v: Any, events: Events, *, build: Build = "fused"
) -> User:
    """Compute the state that `read` gives, from keys and values that it gave for the same events at another `now`.

    k, v: of that state. In them, `now` matters for the bias of each group's last event only, so that event alone is
    computed again: it stands to the events before it as a candidate does. The candidates' bias is looked up again.
    """
    parts, lengths = _groups(cfg, events)
    given = prepare(
        params, cfg, events
    )  # its bias is not used, so a program that is jitted does not compute any of it
    if not cfg.timed:
        return User(k, v, lengths, given.of_candidates, given.scale, given.question)
    last = jnp.maximum(lengths - 1, 0)[:, None]  # 0 in an empty group, where nothing sees it
    happened, _, asked = _places(cfg, parts, lengths, events.now)
    own = Places(*(jnp.take_along_axis(x, last, axis=1) for x in happened))  # type: ignore[arg-type]
    tables = _tables(params.bases, jnp.clip(events.scenario, 0, cfg.scenarios - 1))
    bias = spread(tables, Places(last, asked.time), _with(happened, own))
    x = jnp.take_along_axis(given.x, last.reshape(*given.x.shape[:2], 1, 1), axis=2)
    _, new = candidate_layers(
        build, params.layers, x, cfg.heads, k, v, jnp.maximum(lengths - 1, 0), bias, given.scale
    )
    group = jnp.arange(len(lengths))

    def replaced(old: jax.Array, new: jax.Array) -> jax.Array:  # [L, G, H, s, h], or a layer's
        return old.at[..., group, :, last[:, 0], :].set(jnp.moveaxis(new[..., 0, :], -3, 0))

    k, v = jax.tree.map(replaced, (k, v), new)
    return User(k, v, lengths, given.of_candidates, given.scale, given.question)


def _places(
    cfg: ClimberConfig, parts: _Parts, lengths: jax.Array, asked: jax.Array
) -> tuple[Places, Places, Places]:
    """The places of events [G, s] as keys, and as queries, whose time is the next event's (MODEL-7); those of
    candidates [G, 1]."""
    times, now = parts.times.reshape(len(lengths), -1), jnp.tile(asked, cfg.blocks)
    place = jnp.broadcast_to(jnp.arange(cfg.part), times.shape)
    if not cfg.timed:
        return Places(place), Places(place), Places(lengths[:, None])
    following = jnp.concatenate([times[:, 1:], times[:, -1:]], axis=1)
    following = jnp.where(place == lengths[:, None] - 1, now[:, None], following)
    return Places(place, times), Places(place, following), Places(lengths[:, None], now[:, None])


def score(
    params: ClimberParams,
    cfg: ClimberConfig,
    user: User,
    rows: jax.Array,
    features: Mapping[str, jax.Array],
    *,
    build: Build = "fused",
) -> jax.Array:
    """The probability of every task for every candidate, [B, m, P] float32; 0 for padding.

    rows: [B, m] int32, -1 for padding. features: by name [B, m, width], numbers or hashed categories from 1 on.
    """
    asked = _asked(params, cfg, user.question, rows, features)
    out, _ = candidate_layers(
        build, params.layers, asked, cfg.heads, user.k, user.v, user.lengths, user.bias, user.scale
    )
    return answer(params, cfg, out, rows)


def rank(
    params: ClimberParams,
    cfg: ClimberConfig,
    events: Events,
    rows: jax.Array,
    features: Mapping[str, jax.Array],
    *,
    build: Build = "fused",
) -> jax.Array:
    """The result of `read` and `score` in one pass: FLAME's way, which keeps nothing of a user."""
    given = prepare(params, cfg, events)
    asked = _asked(params, cfg, given.question, rows, features)
    out = all_layers(
        build, params.layers, given.x, asked, cfg.heads, given.lengths, given.bias, given.of_candidates,
        given.scale,
    )  # fmt: skip
    return answer(params, cfg, out, rows)


def answer(params: ClimberParams, cfg: ClimberConfig, out: jax.Array, rows: jax.Array) -> jax.Array:
    """The tasks' probabilities, [B, m, P], from the layers' output for the candidates, [N_b, B, m, D]."""
    out = out.reshape(cfg.blocks, -1, cfg.hidden).astype(jnp.float32)
    found = tasks(params.heads, fuse(params.fusion, out, cfg.heads)).reshape(*rows.shape, -1)
    return jnp.where(rows[..., None] >= 0, found, 0.0)
