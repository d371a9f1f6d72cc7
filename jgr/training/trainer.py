# SPDX-License-Identifier: Apache-2.0
"""Next-item language modelling: a decoder learns to continue a history of semantic ids.

A training window is a prompt as the server would build it, over up to max_items + 1 consecutive items. Every code of
every item after the first is predicted from what precedes it, so one window supervises all of its items; at serving
time the next item simply follows. The batch of step s is a pure function of (seed, s).

Letters: N windows, B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from jgr.config import ConfigError, TrainConfig
from jgr.models import decoder, params
from jgr.models.decoder import DecoderConfig, DecoderParams

Int32 = npt.NDArray[np.int32]


def decoder_config(train: TrainConfig, vocab_size: int, max_position: int) -> DecoderConfig:
    """The small Qwen3-style decoder that a TrainConfig describes, with tied embeddings."""
    return DecoderConfig(
        family="qwen3",
        vocab_size=vocab_size,
        hidden=train.hidden,
        layers=train.layers,
        heads=train.heads,
        kv_heads=train.kv_heads,
        head_dim=train.head_dim,
        mlp=train.mlp,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied=True,
        max_position=max_position,
    )


class Batch(NamedTuple):
    """tokens [B, T] int32, right padded; lengths [B] int32."""

    tokens: Int32
    lengths: Int32


class Windows:
    """Training windows over users' item sequences, and the batch of any step.

    sequences: per user, catalog rows in time order; users of fewer than two items teach nothing and are left out.
    prefix: [p] int32, the prompt's tokens before the history.
    item_tokens: [n, depth] int32, the tokens of every catalog row's semantic id.
    """

    def __init__(
        self, sequences: Sequence[Int32], prefix: Int32, item_tokens: Int32, train: TrainConfig
    ) -> None:
        self._sequences = [np.asarray(s, np.int32) for s in sequences if len(s) >= 2]
        if not self._sequences:
            raise ConfigError("no user has two interactions: there is nothing to learn from")
        self._prefix, self._item_tokens, self._train = prefix, item_tokens, train
        depth = item_tokens.shape[1]
        self.first_target = len(prefix) + depth  # the prefix and the first item are context only
        self.max_tokens = len(prefix) + (train.max_items + 1) * depth

    def __len__(self) -> int:
        return len(self._sequences)

    def steps_per_epoch(self) -> int:
        return -(-len(self) // self._train.batch)

    def digest(self) -> str:
        """First 16 hex digits of the sha256 over the sequences: equal data, equal digest."""
        digest = hashlib.sha256()
        for sequence in self._sequences:
            digest.update(len(sequence).to_bytes(8, "little") + sequence.tobytes())
        return digest.hexdigest()[:16]

    def batch(self, step: int) -> Batch:
        """The batch of a step: epoch = step // steps_per_epoch, shuffled by (seed, epoch); the tail wraps around."""
        epoch, position = divmod(step, self.steps_per_epoch())
        seed, size = self._train.seed, self._train.batch
        order = np.random.default_rng((seed, epoch)).permutation(len(self))
        chosen = order[np.arange(position * size, (position + 1) * size) % len(order)]
        starts = np.random.default_rng((seed, epoch, position)).random(size)
        tokens = np.zeros((size, self.max_tokens), np.int32)
        lengths = np.zeros(size, np.int32)
        for i, (user, fraction) in enumerate(zip(chosen, starts, strict=True)):
            sequence = self._sequences[user]
            spare = max(len(sequence) - self._train.max_items - 1, 0)
            start = int(fraction * (spare + 1))  # long users: another window every epoch
            items = self._item_tokens[sequence[start : start + self._train.max_items + 1]]
            lengths[i] = len(self._prefix) + items.size
            tokens[i, : lengths[i]] = np.concatenate((self._prefix, items.ravel()))
        return Batch(tokens, lengths)


class State(NamedTuple):
    """Everything that a step changes."""

    params: DecoderParams
    optimizer: Any
    step: jax.Array


def _optimizer(train: TrainConfig) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        train.learning_rate,
        min(train.warmup_steps, train.steps - 1),
        train.steps,
        train.learning_rate * 0.01,
    )

    def decayed(tree: Any) -> Any:  # norms and biases are left out of weight decay
        return jax.tree.map(lambda x: x.ndim > 1 and x.shape[-2] > 1 and x.shape[-1] > 1, tree)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.98, weight_decay=train.weight_decay, mask=decayed),
    )


def initial_state(train: TrainConfig, model: DecoderConfig) -> State:
    """Fresh parameters drawn from train.seed."""
    drawn = params.initialize(decoder.spec(model), jax.random.key(train.seed))
    return State(drawn, _optimizer(train).init(drawn), jnp.zeros((), jnp.int32))


def next_token_loss(
    weights: DecoderParams,
    model: DecoderConfig,
    batch: Batch,
    first_target: int,
    *,
    dropout: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Mean cross-entropy in nats over the tokens from first_target on, [] float32."""
    drop = functools.partial(_dropout, rate=dropout) if dropout > 0 and key is not None else None
    tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    hidden = decoder.prefill(weights, model, tokens, lengths, dropout=drop, key=key).hidden
    scores = jax.nn.log_softmax(decoder.logits(weights, hidden[:, first_target - 1 : -1]), axis=-1)
    targets = tokens[:, first_target:]
    real = jnp.arange(first_target, tokens.shape[1]) < lengths[:, None]
    taken = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return -jnp.where(real, taken, 0.0).sum() / jnp.maximum(real.sum(), 1)


def _dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


@functools.partial(jax.jit, static_argnames=("train", "model", "first_target"), donate_argnums=0)
def train_step(
    state: State, batch: Batch, *, train: TrainConfig, model: DecoderConfig, first_target: int
) -> tuple[State, jax.Array]:
    """One optimizer step; gives the new state and the loss before it."""
    key = jax.random.fold_in(jax.random.key(train.seed + 1), state.step)
    loss, gradients = jax.value_and_grad(next_token_loss)(
        state.params, model, batch, first_target, dropout=train.dropout, key=key
    )
    updates, optimizer = _optimizer(train).update(gradients, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer, state.step + 1), loss


def fit(
    windows: Windows,
    train: TrainConfig,
    model: DecoderConfig,
    on_step: Callable[[int, State, jax.Array], None] = lambda step, state, loss: None,
    start: State | None = None,
) -> DecoderParams:
    """Train up to train.steps steps, from `start` (default: fresh parameters); gives the parameters.

    on_step(steps done, state, loss) after each; the loss is still on the device, and the state is the next step's to
    overwrite. From a state that an earlier run left, every later batch, dropout mask and loss is that run's own.
    """
    state = initial_state(train, model) if start is None else start
    for step in range(int(state.step), train.steps):
        state, loss = train_step(
            state, windows.batch(step), train=train, model=model, first_target=windows.first_target
        )
        on_step(step + 1, state, loss)
    return state.params
