# SPDX-License-Identifier: Apache-2.0
"""The stages of Climber's pass, each as a program of its own, and the least time that each can take on this device.

    linear      every layer's norms, projections and MLPs                     FLOPs, or weights and tokens
    history     every layer's attention among the history's events            FLOPs, or exponentials
    candidates  every layer's attention of candidates to it and themselves    the same
    heads       fusion of the blocks, experts, towers                         FLOPs, or weights
    inputs      embeddings, sub-sequences, the bias of all pairs              bytes

The least time is the longest of FLOPs, bytes and exponentials at rates that are measured in the same run: of the
fastest of a square matmul and the products that Climber is made of, of a copy, and of exponentials of a large array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.models import climber, climber_costs
from jgr.models.climber import ClimberConfig, ClimberParams, Events
from jgr.models.climber_layers import linear
from jgr.ops.biased_attention import Causal, Context, Targets, biased_attention
from jgr.ops.exponential import exp_negative

SQUARE = {"cpu": 1024, "gpu": 8192}
COPIED = {"cpu": 2**16, "gpu": 2**28}
EXPONENTIALS = {"cpu": 2**17, "gpu": 2**26}
"""How many numbers are exponentiated to measure the rate. On a CPU they fit a core's cache, as a block's logits do."""

Call = Callable[[], Any]


class Work(NamedTuple):
    """An amount of work: what a stage must do at least, or what a device does in a second."""

    flops: float
    bytes: float
    exponentials: float = 0.0

    def seconds(self, rates: Work) -> dict[str, float]:
        """The time that FLOPs, bytes and exponentials each need at these rates; the longest binds the stage."""
        return {name: getattr(self, name) / getattr(rates, name) for name in self._fields}


class Stage(NamedTuple):
    run: Call
    work: Work


def products(cfg: ClimberConfig, candidates: int, dtype: Any, device: str) -> dict[str, tuple[Call, float]]:
    """A large square and products of the layers: a call, and its FLOPs."""
    tokens, width = cfg.blocks * (cfg.part + candidates), cfg.hidden // cfg.heads
    side, heads = SQUARE[device], cfg.blocks * cfg.heads

    def call(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[Call, float]:
        run = functools.partial(jax.jit(jnp.matmul), jnp.ones(x, dtype), jnp.ones(y, dtype))
        return run, 2.0 * x[-1] * run().size

    return {
        f"square_{side}": call((side, side), (side, side)),
        "qkv": call((tokens, cfg.hidden), (cfg.hidden, 3 * cfg.hidden)),
        "out": call((tokens, cfg.hidden), (cfg.hidden, cfg.hidden)),
        "logits": call((heads, candidates, width), (heads, width, cfg.part)),
        "values": call((heads, candidates, cfg.part), (heads, cfg.part, width)),
    }


def movers(device: str) -> dict[str, tuple[Call, float]]:
    """A call and what it does: the bytes that a copy moves, and exponentials."""
    x, y = jnp.zeros(COPIED[device], jnp.float32), jnp.zeros(EXPONENTIALS[device], jnp.float32)
    return {
        "bytes": (functools.partial(jax.jit(lambda x: x + 1), x), 2.0 * x.nbytes),
        "exponentials": (functools.partial(jax.jit(exp_negative), y), float(y.size)),
    }


def works(cfg: ClimberConfig, candidates: int, size: int, small: int) -> dict[str, Work]:
    """The stages' work for one user. size: bytes of a number; small: numbers of the heads' weights."""
    s, m, groups = cfg.part, candidates, cfg.blocks * cfg.layers
    layer = 4 * cfg.hidden**2 + 2 * cfg.hidden * cfg.mlp
    whole = climber_costs.of_both(cfg, m)

    def attention(work: climber_costs.Work, queries: int, keys: int) -> Work:
        return Work(
            4.0 * groups * cfg.hidden * work.pairs,
            2.0 * groups * (queries + keys) * cfg.hidden * size,
            float(climber_costs.exponentials(cfg, work, cfg.heads)),
        )

    found = {
        "linear": Work(
            2.0 * groups * (s + m) * layer,
            float(size * (groups * layer + 2 * cfg.blocks * (s + m) * cfg.hidden)),
        ),
        "history": attention(climber_costs.of_history(cfg), s, s),
        "candidates": attention(climber_costs.of_candidates(cfg, m), m, s + m),
    }
    rest = climber_costs.cost(cfg, whole).flops - sum(work.flops for work in found.values())
    found["heads"] = Work(rest, float(size * (small + cfg.blocks * m * cfg.hidden)))
    found["inputs"] = Work(0.0, float(cfg.blocks * (2 * s * cfg.hidden * size + 4 * (s * s + s))))
    return found


def stages(params: ClimberParams, cfg: ClimberConfig, events: Events, rows: jax.Array) -> dict[str, Stage]:
    """The stages' programs for one user, by the fused ops."""
    dtype, m, s = params.embed.dtype, rows.shape[1], cfg.part
    small = sum(x.size for x in jax.tree.leaves((params.fusion, params.heads)))
    work = works(cfg, m, dtype.itemsize, small)
    attending = _attending(cfg, m, dtype)
    h = jax.random.normal(jax.random.key(0), (cfg.blocks, s + m, cfg.hidden), dtype)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "linear": (_all_linear, (params.layers, h)),
        "history": (functools.partial(_repeat, _to_history, cfg.layers), attending[0]),
        "candidates": (functools.partial(_repeat, _to_user, cfg.layers), attending[1]),
        "heads": (
            lambda params, out, rows: climber.answer(params, cfg, out, rows),
            (params, h[:, None, s:], rows),
        ),
        "inputs": (lambda params, events: climber.prepare(params, cfg, events), (params, events)),
    }
    return {
        name: Stage(functools.partial(jax.jit(call), *given), work[name])
        for name, (call, given) in calls.items()
    }


def _attending(cfg: ClimberConfig, candidates: int, dtype: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of _to_history and _to_user."""
    groups, heads, width = cfg.blocks, cfg.heads, cfg.hidden // cfg.heads

    def qkv(tokens: int) -> tuple[jax.Array, ...]:
        shapes = ((groups, tokens, heads, width), *[(groups, heads, tokens, width)] * 2)
        keys = jax.random.split(jax.random.key(tokens), 3)
        return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))

    lengths, scale = jnp.full((groups,), cfg.part), jnp.full((groups,), width**-0.5)
    square, row = jnp.zeros((groups, 1, cfg.part, cfg.part)), jnp.zeros((groups, 1, 1, cfg.part + 1))
    history = qkv(cfg.part)
    return (*history, lengths, square, scale), (*qkv(candidates), lengths, row, scale, *history[1:])


def _to_history(q: jax.Array, k: Any, v: Any, lengths: Any, bias: Any, scale: Any) -> jax.Array:
    return biased_attention(q, k, v, Causal(lengths), bias=bias, scale=scale)


def _to_user(
    q: jax.Array, k: Any, v: Any, lengths: Any, bias: Any, scale: Any, cached_k: Any, cached_v: Any
) -> jax.Array:
    every, context = Targets(jnp.full_like(lengths, q.shape[1])), Context(cached_k, cached_v, Causal(lengths))
    return biased_attention(q, k, v, every, context=context, bias=bias, scale=scale)


def _repeat(attend: Callable[..., jax.Array], times: int, q: jax.Array, *others: Any) -> jax.Array:
    """Call `attend` so many times, each time with the last result as the queries."""
    out: jax.Array = jax.lax.scan(lambda q, _: (attend(q, *others), None), q, None, length=times)[0]
    return out


def _all_linear(layers: Any, h: jax.Array) -> jax.Array:
    def step(h: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        qkv = linear("fused", h, layer.qkv, norm=(layer.attention_scale, layer.attention_shift))
        h = linear("fused", qkv[..., : h.shape[-1]], layer.out, layer.out_bias, residual=h)
        inner = linear("fused", h, layer.up, layer.up_bias, (layer.mlp_scale, layer.mlp_shift), "gelu")
        return linear("fused", inner, layer.down, layer.down_bias, residual=h), None

    out: jax.Array = jax.lax.scan(step, h, layers)[0]
    return out
