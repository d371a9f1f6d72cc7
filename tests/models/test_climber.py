# SPDX-License-Identifier: Apache-2.0
"""Climber: the formulas in float64, one user and one candidate at a time; what scores must not depend on; its cost."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.config import UserError
from jgr.models import climber, climber_costs, scorers
from jgr.models.climber import BASE, LONG, ClimberConfig, ClimberParams, Events, Feature
from jgr.models.climber_layers import Build
from jgr.models.params import Spec, abstract
from jgr.ops.biased_attention import IMPLEMENTATIONS as ATTENTION
from jgr.ops.fused_linear import IMPLEMENTATIONS as LINEAR
from tests.models.products import dot_flops

Array = np.ndarray[Any, Any]

CFG = ClimberConfig(
    n_items=30, max_items=12, blocks=2, layers=2, hidden=32, heads=2, mlp=16, tasks=("click", "like"), items="",
    experts=3, scenarios=3, actions=2, features=(Feature("price", 2), Feature("genre", 3, rows=7)),
)  # fmt: skip
PROGRAMS: tuple[Build, ...] = ("fused", "xla")
BY_BEHAVIOUR = dataclasses.replace(CFG, behaviours=(0, 0b10))
PLAIN = dataclasses.replace(CFG, layers=1, timed=False, actions=0, features=())
USERS, ITEMS = 4, 5
LENGTHS = np.array([12, 3, 0, 9])  # the second has one sub-sequence, the third none


def draw(cfg: ClimberConfig) -> ClimberParams:
    """Parameters where nothing is zero."""
    rng = np.random.default_rng(0)

    def one(declared: Spec) -> Array:
        scale = declared.fan_in**-0.5 if declared.fan_in else 0.2
        return np.float32(scale * rng.normal(size=declared.shape))

    drawn: ClimberParams = jax.tree.map(one, climber.spec(cfg), is_leaf=lambda x: isinstance(x, Spec))
    return drawn


def draw_events() -> Events:
    rng = np.random.default_rng(1)
    shape = (USERS, CFG.max_items)
    there = np.arange(CFG.max_items) < LENGTHS[:, None]
    times = np.cumsum(rng.integers(0, 90_000, shape), axis=1)
    return Events(
        np.where(there, rng.integers(0, CFG.n_items, shape), -1).astype(np.int32),
        np.where(there, rng.integers(0, 4, shape), 7).astype(np.int32),
        np.where(there, times, 12345).astype(np.int32),
        (times[:, -1] + 5000).astype(np.int32),
        np.array([2, 0, 1, 1], np.int32),
    )


EVENTS = draw_events()
ROWS = np.random.default_rng(2).integers(0, CFG.n_items, (USERS, ITEMS)).astype(np.int32)
FEATURES = {
    "price": np.random.default_rng(3).normal(0, 30, (USERS, ITEMS, 2)).astype(np.float32),
    "genre": np.random.default_rng(4).integers(0, 2**31 - 1, (USERS, ITEMS, 3)).astype(np.int32),
}
FEATURES["price"][0, 1] = 0  # missing
FEATURES["genre"][:, :, 2] = 0


@functools.cache
def compiled(cfg: ClimberConfig, name: str, build: Build = "fused") -> Any:
    """Also the build of single operations, of which each would be a program of its own:
    tests/serving/scorers/test_builds.py runs it as it is served."""
    return jax.jit(functools.partial(getattr(climber, name), cfg=cfg, build=build))


def scores(
    cfg: ClimberConfig,
    rows: Array = ROWS,
    features: Any = FEATURES,
    events: Events = EVENTS,
    weights: ClimberParams | None = None,
) -> Array:
    weights = weights or draw(cfg)
    user = compiled(cfg, "read")(weights, events=events)
    return np.array(compiled(cfg, "score")(weights, user=user, rows=rows, features=features))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    divided: Array = powers / powers.sum(-1, keepdims=True)
    return divided


def norm(x: Array, scale: Array, shift: Array) -> Array:
    normal: Array = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return normal * (1 + scale) + shift


def gelu(x: Array) -> Array:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def heads_of(x: Array) -> tuple[Array, ...]:
    """q, k, v, each [heads, tokens, width], of [tokens, 3 D]."""
    return tuple(y.reshape(len(x), CFG.heads, -1).swapaxes(0, 1) for y in np.split(x, 3, axis=1))


def part_of(cfg: ClimberConfig, block: int, user: int) -> list[int]:
    """The places of the block's events."""
    places = list(range(LENGTHS[user]))
    if cfg.behaviours:
        bits = cfg.behaviours[block]
        return [i for i in places if not bits or EVENTS.actions[user, i] & bits][-6:]
    return [i for i in places if (LENGTHS[user] - 1 - i) // 6 == block]


def block_by_hand(w: Any, cfg: ClimberConfig, block: int, user: int, candidate: Array) -> Array:
    """[D]: what the candidate, [D], is behind the block's layers, as last of the sub-sequence."""
    places, scenario = part_of(cfg, block, user), EVENTS.scenario[user]
    x = [w.embed[EVENTS.rows[user, i]] for i in places]
    for at, i in enumerate(places):
        for bit in range(2):
            x[at] = x[at] + w.actions[bit] * (EVENTS.actions[user, i] >> bit & 1)
    h = np.stack([*x, candidate]) * np.sqrt(32)
    count = len(h)
    times = [*EVENTS.times[user, places], EVENTS.now[user]]
    bias = np.full((count, count), -np.inf)
    for i in range(count):
        for j in range(i + 1):
            seconds = abs(int(times[min(i + 1, count - 1)]) - int(times[j]))
            bucket = min(int(np.float32(np.log(np.float32(max(1, seconds)))) / np.float32(0.301)), 128)
            bias[i, j] = w.bases.positions[block, i - j] + w.bases.of_positions[block, scenario, i - j]
            bias[i, j] += w.bases.times[block, bucket] + w.bases.of_times[block, scenario, bucket]
    f = w.temperature
    inner = np.maximum(np.concatenate([f.blocks[block], f.scenarios[scenario]]) @ f.w1, 0)
    temperature = 4 * softplus(inner @ f.w2 + f.bias + math.log(math.e - 1))  # sqrt(16) at the start
    for at in range(cfg.layers):
        layer = jax.tree.map(lambda x, at=at: x[at, block], w.layers)
        q, k, v = heads_of(norm(h, layer.attention_scale, layer.attention_shift) @ layer.qkv)
        out = softmax((q @ k.swapaxes(1, 2) + bias) / temperature) @ v
        h = h + out.swapaxes(0, 1).reshape(h.shape) @ layer.out + layer.out_bias
        inner = gelu(norm(h, layer.mlp_scale, layer.mlp_shift) @ layer.up + layer.up_bias)
        h = h + inner @ layer.down + layer.down_bias
    last: Array = h[-1]
    return last


def scores_by_hand(cfg: ClimberConfig, user: int, number: int, features: bool = True) -> Array:
    """[P] in float64."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), draw(cfg))
    candidate = w.embed[ROWS[user, number]] + w.question[EVENTS.scenario[user]]
    done = [sum(EVENTS.actions[user, i] >> bit & 1 for i in range(LENGTHS[user])) for bit in range(2)]
    candidate = candidate + np.array([*done, 20]) / (LENGTHS[user] + 20) @ w.habits
    if features:
        price = FEATURES["price"][user, number].astype(np.float64)
        candidate = candidate + (np.sign(price) * np.log1p(abs(price))) @ w.features["price"]
        for value in FEATURES["genre"][user, number]:
            candidate = candidate + (w.features["genre"][value % 7] if value else 0)
    e = np.stack([block_by_hand(w, cfg, block, user, candidate) for block in range(2)])
    q, k, v = heads_of(norm(e, *w.fusion.norm) @ w.fusion.qkv)
    out = softmax(q @ k.swapaxes(1, 2) / 4) @ v
    f = e + out.swapaxes(0, 1).reshape(e.shape) @ w.fusion.out
    inner = np.maximum(f.ravel() @ w.fusion.gate1.reshape(64, 32), 0)
    z = sum(sigmoid(inner @ w.fusion.gate2[block]) * f[block] for block in range(2))
    t = w.heads
    experts = [np.maximum(z @ t.expert1[x] + t.expert1_bias[x], 0) @ t.expert2[x] for x in range(cfg.experts)]
    found = []
    for task in range(2):
        mixed = softmax(z @ t.gates[task]) @ np.stack(experts)
        tower = np.maximum(mixed @ t.tower1[task] + t.tower1_bias[task], 0)
        found.append(sigmoid(tower @ t.tower2[task] + t.tower2_bias[task]))
    return np.array(found)


@pytest.mark.parametrize("cfg", [CFG, BY_BEHAVIOUR], ids=["by_age", "by_behaviour"])
def test_scores_are_the_formulas(cfg: ClimberConfig) -> None:
    got = scores(cfg)
    for user in range(USERS):
        for number in range(2):
            np.testing.assert_allclose(got[user, number], scores_by_hand(cfg, user, number), atol=2e-6)
    assert np.median(abs(got - 0.5)) < 0.45 and got.std(axis=1).min() > 0.005  # far from the ends, and apart


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_categories_mean_the_same_in_every_integer_type(dtype: Any) -> None:
    """There may be more rows than a small type can count."""
    cfg = dataclasses.replace(CFG, features=(Feature("genre", 3, rows=1000),))
    genre = FEATURES["genre"].astype(np.int64) % (np.iinfo(dtype).max + 1)
    same = [scores(cfg, features={"genre": genre.astype(kind)}) for kind in (np.int32, dtype)]
    np.testing.assert_array_equal(*same)


def test_features_that_are_not_given_add_nothing() -> None:
    np.testing.assert_allclose(scores(CFG, features={})[3, 0], scores_by_hand(CFG, 3, 0, False), atol=2e-6)
    zeros = {name: np.zeros_like(x) for name, x in FEATURES.items()}
    np.testing.assert_allclose(scores(CFG, features=zeros), scores(CFG, features={}), atol=2e-6)


def test_categories_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="reads genre as categories, whole numbers, and is given float32"):
        scores(CFG, features=FEATURES | {"genre": FEATURES["genre"].astype(np.float32)})


def test_scores_depend_on_no_split_order_company_or_padding() -> None:
    want = scores(CFG)
    order = np.array([3, 0, 4, 1, 2])
    turned = scores(CFG, ROWS[:, order], {name: x[:, order] for name, x in FEATURES.items()})
    np.testing.assert_allclose(turned, want[:, order], atol=2e-6)
    fewer = np.where(np.arange(ITEMS) % 2, ROWS, -1)
    got = scores(CFG, fewer)
    np.testing.assert_allclose(got, np.where(fewer[..., None] >= 0, want, 0), atol=2e-6)
    single = scores(CFG, ROWS[:, 1:2], {name: x[:, 1:2] for name, x in FEATURES.items()})
    np.testing.assert_allclose(single, want[:, 1:2], atol=2e-6)
    there = np.arange(CFG.max_items) < LENGTHS[:, None]
    dirty = EVENTS._replace(
        actions=np.where(there, EVENTS.actions, 2), times=np.where(there, EVENTS.times, -9)
    )
    np.testing.assert_array_equal(scores(CFG, events=dirty), want)


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" takes the kernels, step by step."""
    for module, forms in (("biased_attention", ATTENTION), ("fused_linear", LINEAR)):
        kernel = next(form for form in forms if form.name == "pallas_interpret")
        monkeypatch.setattr(
            f"jgr.ops.{module}.IMPLEMENTATIONS", (dataclasses.replace(kernel, platforms=None),)
        )


def test_the_programs_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, want = draw(CFG), scores(CFG)
    given: Any = dict(events=EVENTS, rows=ROWS, features=FEATURES)
    np.testing.assert_allclose(compiled(CFG, "rank")(weights, **given), want, atol=2e-6)
    xla = jax.jit(functools.partial(climber.rank, cfg=CFG, build="xla"))
    np.testing.assert_allclose(xla(weights, **given), want, atol=2e-6)
    interpreted(monkeypatch)
    kernels = jax.jit(functools.partial(climber.rank, cfg=CFG))
    assert "pallas_call" in str(kernels.trace(weights, **given).jaxpr)
    np.testing.assert_allclose(kernels(weights, **given), want, atol=1e-4)


@pytest.mark.slow
def test_single_operations_compute_the_same() -> None:
    """Also of a Climber without times, actions and features."""
    weights, want = climber.by_layer(draw(PLAIN)), scores(PLAIN)
    given: Any = dict(rows=ROWS, features={})
    got = compiled(PLAIN, "rank", "op_by_op")(weights, events=EVENTS, **given)
    np.testing.assert_allclose(got, want, atol=2e-6)
    user = compiled(PLAIN, "read", "op_by_op")(weights, events=EVENTS)
    got = compiled(PLAIN, "score", "op_by_op")(weights, user=user, **given)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.slow
def test_gradients_are_those_of_differences() -> None:
    weights = draw(PLAIN)

    def loss(weights: ClimberParams, build: Build) -> jax.Array:
        user = climber.read(weights, PLAIN, EVENTS, build=build)
        return jnp.log(climber.score(weights, PLAIN, user, ROWS, {}, build=build)).sum()

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    fused, xla = ([np.asarray(x) for x in jax.tree.leaves(gradients(weights, b))] for b in PROGRAMS)
    for of_fused, of_xla in zip(fused, xla, strict=True):
        np.testing.assert_allclose(of_fused, of_xla, rtol=1e-3, atol=2e-4)
    leaves, tree = jax.tree.flatten(weights)
    rng, size = np.random.default_rng(5), sum(np.vdot(x, x) for x in fused)
    # Upwards, so that it does not cancel, but not straight.
    direction = [0.02 / size * x * rng.uniform(0, 2, x.shape) for x in fused]
    ahead, back = (
        [np.float32(x + sign * y) for x, y in zip(leaves, direction, strict=True)] for sign in (1, -1)
    )
    change, other = (
        np.log(scores(PLAIN, weights=tree.unflatten(x)).astype(np.float64)).sum() for x in (ahead, back)
    )
    slope = sum(np.vdot(x, y) for x, y in zip(fused, direction, strict=True))
    assert (change - other) / 2 == pytest.approx(slope, rel=0.02)


def test_the_ranker_says_what_it_needs() -> None:
    needs = scorers.scorer(CFG).needs(CFG)
    assert (needs.max_items, needs.tasks, needs.timed, needs.actions, needs.scenarios) == (
        12, ("click", "like"), True, 2, 3,
    )  # fmt: skip
    assert needs.features == (("price", 2), ("genre", 3))
    assert ClimberConfig(**json.loads(json.dumps(dataclasses.asdict(BY_BEHAVIOUR)))) == BY_BEHAVIOUR


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_items": 13}, "max_items 13 is no multiple of blocks 2"),
        ({"heads": 3}, "hidden 32 is no multiple of heads 3"),
        ({"behaviours": (1,)}, "1 behaviours, and 2 blocks"),
        ({"behaviours": (1, 4)}, "more than 2 bits"),
        ({"features": (("../price", 1, 0),)}, "'../price' cannot be a feature's name"),
        ({"features": (("", 1, 5),)}, "'' cannot be a feature's name"),
    ],
)
def test_configs_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CFG, **change)


def test_the_cost_is_that_of_the_products_in_the_program() -> None:
    one = jax.tree.map(lambda x: x[:1], (EVENTS, ROWS, FEATURES))
    program = jax.make_jaxpr(functools.partial(climber.rank, cfg=CFG, build="xla"))
    events, rows, features = one
    found = dot_flops(program(draw(CFG), events=events, rows=rows, features=features).jaxpr)
    # The plain form computes the squares that it masks, and a candidate's weight times its own value by no product.
    # Besides: actions, habits, prices, temperature, and matrices that sum and spread a head's numbers, in place of
    # products.
    work = climber_costs.of_both(CFG, ITEMS)
    square = work._replace(pairs=6 * 6 + ITEMS * 7)
    others = 12 * 2 * 32 + 3 * 32 + ITEMS * 2 * 32 + 2 * (32 * 16 + 16) + 4 * ITEMS * 32 * (2 * 2 - 2)
    assert found == climber_costs.cost(CFG, square).flops + 2 * others - 2 * 4 * ITEMS * 32
    read, score = climber_costs.of_history(CFG), climber_costs.of_candidates(CFG, ITEMS)
    assert (work.pairs, work.tokens) == (read.pairs + score.pairs, read.tokens + score.tokens) == (56, 11)


def parameters(tree: Iterable[Any]) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("cfg", "candidates", "published", "all_pairs", "needed"),
    [(BASE, 128, 3.72e9, 3.721e9, 2.718e9), (LONG, 512, 1.64e10, 1.811e10, 1.006e10)],
)
def test_flames_sizes(
    cfg: ClimberConfig, candidates: int, published: float, all_pairs: float, needed: float
) -> None:
    counted = climber_costs.cost(cfg, climber_costs.all_pairs(cfg, candidates))
    assert counted.flops == pytest.approx(all_pairs, rel=1e-3)
    assert counted.flops == pytest.approx(published, rel=0.11)
    work = climber_costs.of_both(cfg, candidates)
    cost = climber_costs.cost(cfg, work)
    assert cost.flops == pytest.approx(needed, rel=1e-3)
    declared = abstract(climber.spec(cfg))
    weights = parameters(
        [x for x in (declared.layers.qkv, declared.layers.out, declared.layers.up, declared.layers.down)]
    )
    rest = (declared.fusion.qkv, declared.fusion.out, declared.fusion.gate1, declared.fusion.gate2)
    heads = declared.heads
    weights += parameters([*rest, heads.expert1, heads.expert2, heads.gates, heads.tower1, heads.tower2])
    assert cost.bytes == 4 * (weights + cfg.blocks * cfg.hidden * work.tokens)
    assert climber_costs.exponentials(cfg, work, cfg.heads) == 2 * 12 * 4 * work.pairs


@pytest.mark.parametrize(("cfg", "build"), [(CFG, "fused"), (BY_BEHAVIOUR, "xla"), (CFG, "op_by_op")])
def test_keys_and_values_of_another_now_are_renewed(cfg: ClimberConfig, build: Build) -> None:
    """As for a user who asks again later: only the last events depend on now, and are computed again."""
    weights = draw(cfg) if build != "op_by_op" else climber.by_layer(draw(cfg))
    later = EVENTS._replace(now=EVENTS.now + np.array([1, 10**6, 90_000, 10**6], np.int32))
    kept = compiled(cfg, "read", build)(weights, events=EVENTS)
    user = compiled(cfg, "renew", build)(weights, k=kept.k, v=kept.v, events=later)
    score = functools.partial(compiled(cfg, "score", build), weights, rows=ROWS, features=FEATURES)
    found = score(user=user)
    np.testing.assert_allclose(found, scores(cfg, events=later), atol=1e-5)
    old = score(user=kept)
    assert np.abs(old - found).max(axis=(1, 2))[[1, 3]].min() > 1e-4
    stale = user._replace(k=kept.k, v=kept.v)  # the last events as they were
    assert np.abs(score(user=stale) - found).max() > 1e-5
