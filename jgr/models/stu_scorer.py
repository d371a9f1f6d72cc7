# SPDX-License-Identifier: Apache-2.0
"""DLRMv3's scorer: the parts around the STU (MODEL-17), and candidates in micro-batches (M-FALCON, MODEL-13).

    event      content(embed[item]) + action(bits)        candidate: action of its own, learned
    context    embed_slot[value] W_slot + b_slot          nothing where the value is missing
    input      x * sqrt(D) + position[places back from the end] + time[bucket of seconds before now]
    score      sigmoid(head(norm([y, phases of now] W) * tower(embed[item])))      of each task
    content, action, tower, head = MLPs: norm(W2 g(W1 x)), g(x) = x * sigmoid(norm(x)); the head without the last norm

`prefill` computes a user's context and history once; `score` reads their keys and values for any number of candidates,
a micro-batch at a time. Candidates see the user and themselves, so a score depends neither on the micro-batch nor on
the other candidates.

A user's rows depend on the whole history and on now: positions count back from its end, times from now, and contextual
slots see all of it. Only a scorer without these can take further events: `extend` refuses for all others.

Letters: B users, S = max_items, C contextual slots, m candidates, b of them at once, n items of the catalog, D hidden,
E width of an embedding, P tasks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.models import stu
from jgr.models.hstu import WindowSlides, standard
from jgr.models.params import Spec
from jgr.models.stu import Past, StuConfig, StuLayer

MLP_EPS = 1e-5
DAY, WEEK = 86_400, 604_800
PERIODS = (DAY, WEEK)


class HistoryIsWhole(ValueError):
    """A history that cannot grow in the cache, because every row of it depends on its end."""


@dataclass(frozen=True)
class StuScorerConfig:
    """Architecture only.

    items: digest of the catalog whose rows the model embeds. actions: number of action bits. slots: number of values of
    each contextual slot. position_rows, time_rows: rows of the positional encoder's two tables, 0: there is none.
    tasks: names of the outcomes that scores are probabilities of.
    """

    stack: StuConfig
    n_items: int
    max_items: int
    item_dim: int
    actions: int
    action_dim: int
    slots: tuple[int, ...]
    mlp: int
    position_rows: int
    time_rows: int
    tasks: tuple[str, ...]
    items: str
    time_scale: Literal["sqrt", "log"] = "sqrt"

    def __post_init__(self) -> None:
        if len(self.slots) != self.stack.contextual:
            raise ValueError(f"{len(self.slots)} slots, the stack has {self.stack.contextual}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mlp:
    """Weights of an MLP: linear, gate, linear, norm. Norms are (scale minus 1, bias); the last one may be None."""

    w1: Any  # [I, F]: first matrix
    b1: Any  # [1, F]: its bias
    norm1: Any  # [2, F]: norm in the gate g
    w2: Any  # [F, O]: second matrix
    b2: Any  # [1, O]: its bias
    norm2: Any  # [2, O]: the last norm, or None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StuScorerParams:
    embed: Any  # [n, E]: a row for each item
    content: Mlp  # E to D
    actions: Any  # [actions, action_dim]: a row for each action bit
    candidate_action: Any  # [actions * action_dim]: what stands in the place of a candidate's action
    action: Mlp  # actions * action_dim to D
    slots: Any  # [sum of slots, E]: rows of all slots' values; None without context
    slot_weights: Any  # [C, E, D]: a matrix for each slot
    slot_biases: Any  # [C, D]: a bias for each slot
    position: Any  # [position_rows, D]: rows by places back from the end; None without positions
    time: Any  # [time_rows, D]: rows by the time before now; None without times
    layers: StuLayer
    out: Any  # [D + 4, D]
    out_bias: Any  # [1, D]
    out_norm: Any  # [2, D]
    tower: Mlp  # E to D
    head: Mlp  # D to P


class Events(NamedTuple):
    """Users' events, [B, S] int32 each: rows, oldest first, -1 on the right; bits of actions; times in seconds."""

    rows: jax.Array
    actions: jax.Array
    times: jax.Array


class User(NamedTuple):
    """The users' state that `score` reads. past: C + S rows. ends: [B] int32, C + events. now: [B] int32 seconds."""

    past: Past
    ends: jax.Array
    now: jax.Array


def _mlp_spec(inputs: int, inner: int, outputs: int, *, normed: bool = True) -> Mlp:
    return Mlp(
        w1=Spec((inputs, inner), ("embed", "mlp"), fan_in=inputs),
        b1=Spec((1, inner), ("one", "mlp"), "zeros"),
        norm1=Spec((2, inner), ("norm", "mlp"), "zeros"),
        w2=Spec((inner, outputs), ("mlp", "embed"), fan_in=inner),
        b2=Spec((1, outputs), ("one", "embed"), "zeros"),
        norm2=Spec((2, outputs), ("norm", "embed"), "zeros") if normed else None,
    )


def spec(cfg: StuScorerConfig) -> StuScorerParams:
    """The declaration of every parameter."""
    hidden, width, count = cfg.stack.hidden, cfg.item_dim, len(cfg.slots)
    bits = cfg.actions * cfg.action_dim

    def table(rows: int, columns: int, axis: str) -> Spec | None:
        return Spec((rows, columns), (axis, "embed")) if rows else None

    slot = ("slots", "embed", "heads")
    return StuScorerParams(
        embed=table(cfg.n_items, width, "items"),
        content=_mlp_spec(width, cfg.mlp, hidden),
        actions=table(cfg.actions, cfg.action_dim, "actions"),
        candidate_action=Spec((bits,), ("embed",)),
        action=_mlp_spec(bits, cfg.mlp, hidden),
        slots=table(sum(cfg.slots), width, "values"),
        slot_weights=Spec((count, width, hidden), slot, fan_in=width) if count else None,
        slot_biases=Spec((count, hidden), slot[::2], "zeros") if count else None,
        position=table(cfg.position_rows, hidden, "positions"),
        time=table(cfg.time_rows, hidden, "times"),
        layers=stu.spec(cfg.stack),
        out=Spec((hidden + 2 * len(PERIODS), hidden), ("embed", "embed"), fan_in=hidden),
        out_bias=Spec((1, hidden), ("one", "embed"), "zeros"),
        out_norm=Spec((2, hidden), ("norm", "embed"), "zeros"),
        tower=_mlp_spec(width, cfg.mlp, hidden),
        head=_mlp_spec(hidden, cfg.mlp, len(cfg.tasks), normed=False),
    )


def _norm(x: jax.Array, scale_bias: jax.Array) -> jax.Array:
    return standard(x, MLP_EPS) * (1 + scale_bias[0]) + scale_bias[1]


def _mlp(weights: Mlp, x: jax.Array) -> jax.Array:
    x = x @ weights.w1 + weights.b1
    x = x * jax.nn.sigmoid(_norm(x, weights.norm1))
    x = x @ weights.w2 + weights.b2
    return x if weights.norm2 is None else _norm(x, weights.norm2)


def encode_positions(
    x: jax.Array,
    position: jax.Array | None,
    time: jax.Array | None,
    places: jax.Array,
    history_ends: jax.Array,
    ages: jax.Array,
    contextual: int,
    scale: Literal["sqrt", "log"],
) -> jax.Array:
    """x * sqrt(D) + position[...] + time[...], [B, T, D]; a table that is None has no part in it.

    places: [B, T] int32 in the prompt. Positions count back from the history's end, which has row C, as all candidates
    have; contextual slots have rows 0 to C - 1. ages: [B, T] seconds before now. scale: an age's row is the sqrt or the
    log of its minutes.
    """
    x = x * x.shape[-1] ** 0.5
    if position is not None:
        ends = history_ends[:, None]
        back = jnp.minimum(ends - jnp.minimum(places, ends) + contextual, len(position) - 1)
        x = x + position[jnp.where(places < contextual, places, back)]
    if time is not None:
        minutes = jnp.maximum(ages.astype(jnp.float32), 1e-6) / 60
        bucket = jnp.floor(jnp.sqrt(minutes) if scale == "sqrt" else jnp.log(minutes)).astype(jnp.int32)
        x = x + time[jnp.clip(bucket, 0, len(time) - 1)]
    return x


def _events(params: StuScorerParams, cfg: StuScorerConfig, events: Events) -> jax.Array:
    """The events' vectors [B, T, D], without positions."""
    bits = (events.actions[..., None] >> jnp.arange(cfg.actions)) & 1
    done = (bits[..., None] * params.actions).reshape(*bits.shape[:-1], -1)
    return _mlp(params.content, params.embed[jnp.maximum(events.rows, 0)]) + _mlp(params.action, done)


def _context(params: StuScorerParams, cfg: StuScorerConfig, values: jax.Array) -> jax.Array:
    """The slots' vectors [B, C, D], from values [B, C]; zeros for a value that is missing (-1)."""
    first = np.cumsum([0, *cfg.slots[:-1]])
    x = jnp.einsum("bce,ced->bcd", params.slots[jnp.maximum(values, 0) + first], params.slot_weights)
    return jnp.where(values[..., None] >= 0, x + params.slot_biases, 0.0)


@functools.partial(jax.jit, static_argnames="cfg")
def prefill(
    params: StuScorerParams, events: Events, context: jax.Array, now: jax.Array, *, cfg: StuScorerConfig
) -> User:
    """The users' part of all scores asked at `now`. context: [B, C] int32 values of the slots, -1: missing.

    now: [B] int32 seconds since the origin of the events' times, which is whole weeks from the epoch: the phases of
    day and week count from there.
    """
    slots = len(cfg.slots)
    x = _events(params, cfg, events)
    ages = now[:, None] - events.times
    if slots:
        x = jnp.concatenate([_context(params, cfg, context), x], axis=1)
        ages = jnp.pad(ages, ((0, 0), (slots, 0)))
    ends = slots + (events.rows >= 0).sum(axis=1)
    tokens = stu.describe(cfg.stack, ends, ends, 0, x.shape[1])
    x = _positioned(params, cfg, x, tokens.position, ends, ages)
    return User(stu.layers(params.layers, cfg.stack, x, tokens, ends)[1], ends, now)


def _positioned(
    params: StuScorerParams,
    cfg: StuScorerConfig,
    x: jax.Array,
    places: jax.Array,
    ends: jax.Array,
    ages: jax.Array,
) -> jax.Array:
    return encode_positions(
        x, params.position, params.time, places, ends, ages, len(cfg.slots), cfg.time_scale
    )


@functools.partial(jax.jit, static_argnames=("cfg", "micro_batch"))
def score(
    params: StuScorerParams,
    user: User,
    candidates: jax.Array,
    *,
    cfg: StuScorerConfig,
    micro_batch: int,
) -> jax.Array:
    """The probability of every task for every candidate, [B, m, P] float32; 0 where there is no candidate.

    candidates: [B, m] int32 rows, -1: none. micro_batch: candidates of each user that are computed at once; memory
    grows with it, scores do not depend on it (MODEL-13).
    """
    batch, count = candidates.shape
    parts = jnp.pad(candidates, ((0, 0), (0, -count % micro_batch)), constant_values=-1)
    parts = parts.reshape(batch, -1, micro_batch).transpose(1, 0, 2)
    scores: jax.Array = jax.lax.map(functools.partial(_score_part, params, cfg, user), parts)
    return scores.transpose(1, 0, 2, 3).reshape(batch, -1, len(cfg.tasks))[:, :count]


def _score_part(params: StuScorerParams, cfg: StuScorerConfig, user: User, rows: jax.Array) -> jax.Array:
    """The scores [B, b, P] of rows [B, b]."""
    embedded = params.embed[jnp.maximum(rows, 0)]
    x = _mlp(params.content, embedded) + _mlp(params.action, params.candidate_action)
    tokens = stu.describe(cfg.stack, user.ends, user.ends + rows.shape[1], user.ends, rows.shape[1])
    tokens = tokens._replace(request=jnp.where(rows >= 0, tokens.request, -1))
    x = _positioned(params, cfg, x, tokens.position, user.ends, jnp.zeros_like(rows))
    y, _ = stu.layers(params.layers, cfg.stack, x, tokens, user.ends, user.past)
    angles = 2 * jnp.pi * jnp.stack([user.now % period / period for period in PERIODS], axis=1)
    phases = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)[:, None]
    y = jnp.concatenate([y, jnp.broadcast_to(phases, (*y.shape[:2], phases.shape[2]))], axis=-1)
    asked = _norm(y @ params.out + params.out_bias, params.out_norm)
    found: jax.Array = jax.nn.sigmoid(_mlp(params.head, asked * _mlp(params.tower, embedded)))
    return jnp.where(rows[..., None] >= 0, found, 0.0)


def refuse_growth(cfg: StuScorerConfig) -> None:
    """Raise HistoryIsWhole where a cached history cannot take further events, naming what of the config forbids it."""
    reasons = {
        "contextual slots, which see the history both ways": cfg.slots,
        "positions that count back from the history's end": cfg.position_rows,
        "times that count back from now": cfg.time_rows,
        "full rows at the history's end": cfg.stack.full_rows,
    }
    found = [reason for reason, given in reasons.items() if given]
    if found:
        raise HistoryIsWhole(f"every row of this scorer's histories depends on their end: {'; '.join(found)}")


def extend(
    params: StuScorerParams, user: User, events: Events, now: jax.Array, *, cfg: StuScorerConfig
) -> User:
    """The users with further events, as `prefill` of all would give them, at the cost of the new ones.

    events: [B, m], -1 on the right. Raises HistoryIsWhole as `refuse_growth`, and WindowSlides where a user would have
    more than S events.
    """
    refuse_growth(cfg)
    ends = user.ends + (events.rows >= 0).sum(axis=1)
    if ends.size and int(ends.max()) > cfg.max_items:
        raise WindowSlides(f"{int(ends.max())} events, the window holds {cfg.max_items}: it would slide")
    extended: User = append(params, user, events, now, cfg=cfg)
    return extended


@functools.partial(jax.jit, static_argnames="cfg")
def append(
    params: StuScorerParams, user: User, events: Events, now: jax.Array, *, cfg: StuScorerConfig
) -> User:
    """`extend`, for programs: the caller has seen to it that nothing is refused and no window slides."""
    ends = user.ends + (events.rows >= 0).sum(axis=1)
    batch, count = events.rows.shape
    tokens = stu.describe(cfg.stack, ends, ends, user.ends, count)
    x = _events(params, cfg, events)
    x = _positioned(params, cfg, x, tokens.position, ends, jnp.zeros_like(events.rows))
    _, new = stu.layers(params.layers, cfg.stack, x, tokens, ends, user.past)
    slots = jnp.where(tokens.request >= 0, tokens.position, cfg.max_items)  # out of bounds: not stored
    users = jnp.arange(batch)[:, None]

    def store(old: jax.Array, fresh: jax.Array) -> jax.Array:  # [L, B, H, S, width]
        return old.at[:, users, :, slots].set(fresh.transpose(1, 3, 0, 2, 4), mode="drop")

    return kept_user(cfg, store(user.past.k, new.k), store(user.past.v, new.v), ends, now)


def kept_user(cfg: StuScorerConfig, k: jax.Array, v: jax.Array, ends: jax.Array, now: jax.Array) -> User:
    """The users' state, of keys and values of C + S rows that `prefill` or `append` gave."""
    return User(Past(k, v, stu.describe(cfg.stack, ends, ends, 0, k.shape[3])), ends, now)
