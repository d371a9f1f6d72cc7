# SPDX-License-Identifier: Apache-2.0
"""PPO for the border (HLEM-7): a small actor-critic, its loss and advantages, and one round of training as one program.

A round is an episode of every environment, side by side under `vmap`, and the updates on what they gave (arXiv
1707.06347, with advantages by arXiv 1506.02438). Nothing here knows files or the clock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from jgr.serving.policies.memory_models import WIDTHS
from jgr.serving.policies.memory_signals import ACTIONS, FEATURES, LONGEST, STATE, TAIL
from jgr.simulation.controller import epochs
from jgr.simulation.controller.epochs import Array, Hits, Latency, Traffic, World

GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.95, 0.95, 0.2, 0.01, 0.5
LEAST, MOST = 0.1, 0.9
REQUESTS_SEEN = 300
"""Requests of an epoch that a percentile is measured over, in training: how noisy what the controller sees is."""


class ActorCritic(nn.Module):
    """state f32 [..., STATE] -> (logits f32 [..., actions], value f32 [...]), by two shared layers with tanh."""

    @nn.compact
    def __call__(self, state: Array) -> tuple[Array, Array]:
        hidden = state
        for width in WIDTHS:
            hidden = nn.tanh(nn.Dense(width, kernel_init=nn.initializers.orthogonal(2**0.5))(hidden))
        logits = nn.Dense(len(ACTIONS), kernel_init=nn.initializers.orthogonal(0.01))(hidden)
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(hidden)
        return logits, value[..., 0]


class Steps(NamedTuple):
    """What episodes gave: state f32 [t, n, STATE], action i32 [t, n], and f32 [t, n] each: log_prob of the action when
    it was taken, value of the state, worth, which is learnt from, and reward, which is reported."""

    state: Array
    action: Array
    log_prob: Array
    value: Array
    worth: Array
    reward: Array


class Environment(NamedTuple):
    """One pool between two epochs. split f32 []; epoch i32 []; state f32 [STATE]."""

    hits: Hits
    split: Array
    epoch: Array
    state: Array


def observe(world: World, traffic: Traffic, hits: Hits, found: Latency, split: Array, key: Array) -> Array:
    """The state that an epoch shows (HLEM-4), with the noise of a count of requests."""
    users = hits.users(traffic.hot_share)
    noise = jax.random.normal(key, (4,))

    def counted(share: Array, by: Array) -> Array:
        return jnp.clip(share + by * jnp.sqrt(share * (1.0 - share) / REQUESTS_SEEN), 0.0, 1.0)

    return jnp.stack(
        [
            counted(traffic.hot_share, noise[0]),
            counted(users, noise[1]),
            hits.rows,
            jnp.minimum(1.0, traffic.events / LONGEST),
            counted(jnp.clip(found.late, 0.0, 1.0), noise[2]),
            split,
            jnp.minimum(1.0, found.p99_s / (TAIL * world.limit_s) * jnp.exp(0.04 * noise[3])),
        ]
    )


def reward(world: World, found: Latency) -> Array:
    """HLEM-6, with the percentile cut at TAIL limits, as the state has it."""
    over = jnp.minimum(found.p99_s / world.limit_s, TAIL) - 1.0
    return (1.0 - jnp.clip(found.late, 0.0, 1.0)) - jnp.maximum(0.0, over)


def worth(world: World, found: Latency) -> Array:
    """What training learns from: the logarithm of the 99th percentile, negative (HLEM-3), cut as the reward is.

    Below the limit the reward of HLEM-6 hardly depends on the split, and far above it one overloaded pool weighs more
    than all others: a policy that learnt from it stayed where it began.
    """
    return -jnp.log(jnp.minimum(found.p99_s / world.limit_s, TAIL))


def reset(world: World, traffic: Traffic, split: Array, key: Array) -> Environment:
    """Caches that are warm at a split, before the first epoch. traffic: of all epochs."""
    now = jax.tree.map(lambda column: column[0], traffic)
    hits = epochs.steady_hits(world, now, split)
    found = epochs.latency(world, now, hits)
    return Environment(hits, split, jnp.int32(0), observe(world, now, hits, found, split, key))


def act(
    world: World, traffic: Traffic, before: Environment, action: Array, key: Array
) -> tuple[Environment, Array, Array]:
    """One epoch after an action (its number): what is then, its worth and its reward."""
    now = jax.tree.map(lambda column: column[before.epoch], traffic)
    split = jnp.clip(before.split + jnp.array(ACTIONS, jnp.float32)[action], LEAST, MOST)
    end, mean, found = epochs.step(world, now, before.hits, split)
    state = observe(world, now, mean, found, split, key)
    return Environment(end, split, before.epoch + 1, state), worth(world, found), reward(world, found)


def fixed(world: World, traffic: Traffic, split: Array) -> tuple[Array, Array]:
    """Worths and rewards of a split that stays, from caches that are warm at it, f32 [epochs] each."""
    first = jax.tree.map(lambda column: column[0], traffic)

    def one(hits: Hits, now: Traffic) -> tuple[Hits, tuple[Array, Array]]:
        end, _, found = epochs.step(world, now, hits, split)
        return end, (worth(world, found), reward(world, found))

    found: tuple[Array, Array] = jax.lax.scan(one, epochs.steady_hits(world, first, split), traffic)[1]
    return found


def advantages(rewards: Array, values: Array, last: Array) -> Array:
    """GAE: f32 [t, n]. rewards, values: f32 [t, n]; last: value of the state after them, f32 [n]."""

    def back(after: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (later, value_after), (got, value) = after, now
        found = got + GAMMA * value_after - value + GAMMA * LAMBDA * later
        return (found, value), found

    _, found = jax.lax.scan(back, (jnp.zeros_like(last), last), (rewards, values), reverse=True)
    return found


def loss(logits: Array, value: Array, taken: Steps, advantage: Array, goal: Array) -> Array:
    """The clipped surrogate, half the squared error of the value, and the entropy: f32 []. All but logits: f32 [n]."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, taken.action[:, None], axis=1)[:, 0]
    ratio = jnp.exp(log_prob - taken.log_prob)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantage)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
    return -surrogate.mean() + VALUE * 0.5 * jnp.square(value - goal).mean() - ENTROPY * entropy.mean()


class Learner(NamedTuple):
    """Parameters of `ActorCritic` and the optimizer's state."""

    params: Any
    moments: Any


class Trainer:
    """PPO with these settings. passes: over each round's steps; minibatch: steps of an update, or all where a
    round has fewer.

    round, judge: `_round` and `_judged`, compiled: an episode and the updates on it; the mean worth and the mean reward
    of the policy as it is served.
    """

    def __init__(self, learning_rate: float = 3e-4, passes: int = 10, minibatch: int = 256) -> None:
        self._net = ActorCritic()
        self._optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(learning_rate))
        self._passes, self._minibatch = passes, minibatch
        self.round = jax.jit(self._round)
        self.judge = jax.jit(self._judged)

    def begin(self, key: Array) -> Learner:
        """Fresh weights."""
        params = self._net.init(key, jnp.zeros(STATE))
        return Learner(params, self._optimizer.init(params))

    def _seen(self, params: Any, state: Array) -> tuple[Array, Array]:
        found: Any = self._net.apply(params, state)
        return found[0], found[1]

    def episodes(
        self, params: Any, worlds: World, traffic: Traffic, key: Array, served: bool = False
    ) -> tuple[Steps, Array]:
        """An episode of each world by the present policy, and the values of the states after them, f32 [n].

        worlds: [n] of each scalar; traffic: f32 [n, epochs]. served: from the split .5 on, and always the likeliest
        action; else from any split, and actions by chance, as training needs them.
        """
        begin, run = jax.random.split(key)
        number, length = traffic.load.shape
        splits = jax.random.uniform(begin, (number,), minval=LEAST, maxval=MOST)
        splits = jnp.full(number, 0.5) if served else splits
        first = jax.vmap(reset)(worlds, traffic, splits, jax.random.split(begin, number))

        def one(env: Environment, key: Array) -> tuple[Environment, Steps]:
            logits, value = self._seen(params, env.state)
            choose, noise = jax.random.split(key)
            action = jnp.argmax(logits, axis=-1) if served else jax.random.categorical(choose, logits)
            taken = jax.nn.log_softmax(logits)[jnp.arange(number), action]
            after, worths, got = jax.vmap(act)(worlds, traffic, env, action, jax.random.split(noise, number))
            return after, Steps(env.state, action, taken, value, worths, got)

        last, steps = jax.lax.scan(one, first, jax.random.split(run, length))
        return steps, self._seen(params, last.state)[1]

    def _judged(self, params: Any, worlds: World, traffic: Traffic, key: Array) -> tuple[Array, Array]:
        steps = self.episodes(params, worlds, traffic, key, served=True)[0]
        return steps.worth.mean(), steps.reward.mean()

    def _round(
        self, learner: Learner, worlds: World, traffic: Traffic, key: Array
    ) -> tuple[Learner, dict[str, Array]]:
        roll, order = jax.random.split(key)
        steps, last = self.episodes(learner.params, worlds, traffic, roll)
        # Most of a worth is the traffic's doing, which no action changes; what a split that stays gets of the same
        # traffic takes that out, and leaves the best actions what they were (arXiv 1807.02264).
        usual = jax.vmap(fixed, (0, 0, None))(worlds, traffic, jnp.float32(0.5))[0].T
        advantage = advantages(steps.worth - usual, steps.value, last)
        # Each episode counts alike: where a border moves the latency by a hundredth there is as much to learn as where
        # it decides on an overload.
        alike = (advantage - advantage.mean(0)) / (advantage.std(0) + 1e-8)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (steps, alike, advantage + steps.value))
        minibatch = min(self._minibatch, len(flat[1]))
        count = len(flat[1]) // minibatch

        def update(learner: Learner, chosen: Array) -> tuple[Learner, Array]:
            taken, found, goal = jax.tree.map(lambda x: x[chosen], flat)

            def of(params: Any) -> Array:
                logits, value = self._seen(params, taken.state)
                return loss(logits, value, taken, found, goal)

            value, slope = jax.value_and_grad(of)(learner.params)
            change, moments = self._optimizer.update(slope, learner.moments, learner.params)
            return Learner(optax.apply_updates(learner.params, change), moments), value

        orders = jax.vmap(lambda k: jax.random.permutation(k, len(flat[1])))(
            jax.random.split(order, self._passes)
        )
        chosen = orders[:, : count * minibatch].reshape(-1, minibatch)
        learner, losses = jax.lax.scan(update, learner, chosen)
        return learner, {"loss": losses.mean(), "reward": steps.reward.mean()}


def stacked(worlds: list[World], traffic: list[Traffic]) -> tuple[World, Traffic]:
    """Worlds and their traffic side by side, for `vmap`."""
    side: tuple[World, Traffic] = jax.tree.map(lambda *x: np.stack(x), *zip(worlds, traffic, strict=True))
    return side


def arrays(params: Any) -> dict[str, npt.NDArray[Any]]:
    """The actor as `memory_models.BasePolicy` reads it: names to arrays."""
    found: dict[str, npt.NDArray[Any]] = {"features": np.array(FEATURES), "actions": np.array(ACTIONS)}
    for at in range(len(WIDTHS) + 1):
        layer = params["params"][f"Dense_{at}"]
        found[f"w{at}"], found[f"b{at}"] = (
            np.asarray(layer[name], np.float32) for name in ("kernel", "bias")
        )
    return found
