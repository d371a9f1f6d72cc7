# SPDX-License-Identifier: Apache-2.0
"""The trainer: steps of AdamW on any loss over windows of catalog rows, on one device or a data-parallel mesh.

The one idea: a step is a pure function of (state, batch). Its random numbers are drawn from (train.seed, step), so a
run that goes on from a checkpoint equals the unbroken run. A loss returns a *sum* of nats and the number of targets,
so that a batch computed in parts, or spread over devices, has the loss and the gradient of the whole.

Letters: B batch, N items in a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgr.config import ConfigError, TrainConfig
from jgr.models import params
from jgr.models.params import PyTree

Int32 = npt.NDArray[np.int32]

Loss = Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(params, windows, key) -> the sum of nats and the number of targets, both [] float32.

windows: the output of the run's Batches, [B, ...]; from jgr.training.windows it is [B, N] int32 rows, -1 on the right,
or [B, N, 2] rows and times.
"""

Begin = Callable[[PyTree], PyTree]
"""Turns randomly drawn parameters into those that a training begins with."""

END_OF_SCHEDULE = 0.01
"""The last learning rate, as a share of the peak."""


def as_drawn(drawn: PyTree) -> PyTree:
    """The Begin of a training from scratch: it keeps the drawn parameters."""
    return drawn


class State(NamedTuple):
    """Everything that a step changes."""

    params: PyTree
    optimizer: Any
    step: jax.Array


def _schedule(train: TrainConfig) -> optax.Schedule:
    peak, warmup = train.learning_rate, min(train.warmup_steps, train.steps - 1)
    rest, end = train.steps - warmup, train.learning_rate * END_OF_SCHEDULE
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, END_OF_SCHEDULE),
        "linear": optax.linear_schedule(peak, end, rest),
        "constant": optax.constant_schedule(peak),
    }[train.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(train: TrainConfig, specs: PyTree) -> optax.GradientTransformation:
    """AdamW with global-norm clipping and the schedule of `train`. specs: of the parameters, as Trainer has them."""

    def decayed(spec: params.Spec) -> bool:
        """Whether it is a matrix; norms and biases, which begin as ones or zeros, look like one, stacked by layers."""
        return spec.init == "normal" and len(spec.shape) > 1 and min(spec.shape[-2:]) > 1

    mask = jax.tree.map(decayed, specs, is_leaf=lambda x: isinstance(x, params.Spec))
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(_schedule(train), b2=train.adam_b2, weight_decay=train.weight_decay, mask=mask),
    )


def _placed(optimizer: Any, place: jax.Array) -> Any:
    """The optimizer's state with another place in the schedule; Adam's own count of steps stays."""

    def scheduled(path: Any, value: Any) -> bool:
        del value
        return bool(getattr(path[-1], "tuple_name", "") == optax.ScaleByScheduleState.__name__)

    return optax.tree_utils.tree_set(optimizer, scheduled, count=place)


def dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Set each value of x to 0 with probability `rate`, and scale the others so that the mean stays."""
    if rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


class Trainer:
    """Compiled steps of one loss.

    specs: the pytree of params.Spec to draw parameters from. Raises ConfigError if the machine has fewer devices.
    """

    def __init__(self, train: TrainConfig, specs: PyTree, loss: Loss) -> None:
        self._train, self._specs, self._loss = train, specs, loss
        self._optimizer = make_optimizer(train, specs)
        found = jax.devices()
        if train.devices > len(found):
            raise ConfigError(f"train.devices is {train.devices}, this machine has {len(found)}")
        mesh = Mesh(np.array(found[: train.devices]), ("data",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._spread = NamedSharding(mesh, PartitionSpec(None, "data"))
        self._step = jax.jit(self._one_step, donate_argnums=0)

    def initial(self, begin: Begin = as_drawn) -> State:
        """The state before the first step: parameters drawn from train.seed, passed through `begin`."""
        weights = begin(params.initialize(self._specs, jax.random.key(self._train.seed)))
        return self.place(State(weights, self._optimizer.init(weights), jnp.zeros((), jnp.int32)))

    def place(self, state: State) -> State:
        """Copy the state to every device of the mesh."""
        placed: State = jax.device_put(state, self._everywhere)
        return placed

    def step(self, state: State, rows: Int32, place: int | None = None) -> tuple[State, jax.Array]:
        """Take one optimizer step; returns the new state, in the buffers of the old one, and the loss before the step.

        rows: [train.batch, ...], see Loss. place: where the step is in the learning rate's schedule, in steps; None:
        how many steps there were. The loss is the mean over targets, in nats, [] float32.
        """
        parts = rows.reshape(self._train.micro_batches, -1, *rows.shape[1:])
        at = None if place is None else np.int32(place)
        stepped: tuple[State, jax.Array] = self._step(state, jax.device_put(parts, self._spread), at)
        return stepped

    def _one_step(self, state: State, parts: jax.Array, place: jax.Array | None) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(self._train.seed + 1), state.step)
        differentiate = jax.value_and_grad(self._loss, has_aux=True)

        def add_part(total: PyTree, part: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
            i, rows = part
            (nats, targets), gradients = differentiate(state.params, rows, jax.random.fold_in(key, i))
            return jax.tree.map(jnp.add, total, (nats, targets, gradients)), None

        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        numbers = jnp.arange(parts.shape[0])
        if parts.shape[0] == 1:
            total, _ = add_part(zero, (numbers[0], parts[0]))
        else:
            total, _ = jax.lax.scan(add_part, zero, (numbers, parts))
        nats, targets, gradients = total
        targets = jnp.maximum(targets, 1.0)
        gradients = jax.tree.map(lambda g: g / targets, gradients)
        # Never what the optimizer counted itself: a run that train.minutes ended left the schedule's end there.
        before = _placed(state.optimizer, state.step if place is None else place)
        updates, optimizer = self._optimizer.update(gradients, before, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer, state.step + 1), nats / targets


def fit(
    trainer: Trainer,
    state: State,
    batches: Iterable[Int32],
    on_step: Callable[[int, State, jax.Array], bool],
    place: Callable[[int], int] | None = None,
) -> State:
    """Step through the batches until they end or on_step returns True; returns the last state.

    batches: the batches from step state.step on. on_step(steps done, state, loss): called after each step; the loss is
    still on the device, and the next step overwrites the state. place: takes the steps that are done before a step, and
    gives its place in the schedule of the learning rate; None: just that.
    """
    for done, rows in enumerate(batches, start=int(state.step) + 1):
        state, loss = trainer.step(state, rows, None if place is None else place(done - 1))
        if on_step(done, state, loss):
            break
    return state
