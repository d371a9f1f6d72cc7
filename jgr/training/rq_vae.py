# SPDX-License-Identifier: Apache-2.0
"""RQ-VAE: the codebooks of semantic ids, learnt together with an encoder and a decoder of the item vectors.

The one idea: an MLP encodes x to a latent z, residual quantisation codes z, and another MLP decodes the sum of
the codewords z^ back to x. The gradient of the reconstruction passes the quantisation unchanged (straight
through). Let r_l be the residual at level l (z minus the codewords before, which get no gradient from it), c_l its
nearest codeword and sg = stop gradient:

    loss = |x - decode(z^)|^2 + sum_l ( |sg(r_l) - c_l|^2 + beta |r_l - sg(c_l)|^2 )

- Codebooks start from a residual k-means of the first batch's latents.
- A code that was not used for `reseed_every` steps moves to a residual of the current batch.
- Vectors are scaled to unit variance first (one factor for all), so that the settings fit any unit.
- The batch of step s is a pure function of (seed, s).

Letters: n items, b batch, e dimensions of an item vector, z of a latent, K codes of a level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from jgr.training.semantic_ids import Quantized, SemanticIdError, check_sizes, quantize, residual_kmeans

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]

_ROWS_AT_ONCE = 1 << 14
_NOTE_EVERY = 50
# Random streams of the seed; the k-means of a level uses the level's number.
_WEIGHTS, _SHUFFLE, _RESEED = 16, 17, 18


@dataclass(frozen=True)
class RqVaeConfig:
    """sizes: codes per level. latent: width of z. hidden: the encoder's inner widths; the decoder's are the reverse.

    batch: vectors per step, at most n. steps: steps of AdamW, at a constant learning rate after a short warm-up.
    """

    sizes: tuple[int, ...] = (256, 256, 256)
    latent: int = 32
    hidden: tuple[int, ...] = (256, 128)
    beta: float = 0.25
    steps: int = 2000
    batch: int = 1024
    learning_rate: float = 3e-3
    reseed_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(self.sizes)
        for name in ("latent", "steps", "batch", "reseed_every"):
            if getattr(self, name) < 1:
                raise SemanticIdError(f"rqvae: {name} must be at least 1, not {getattr(self, name)}")


class Layer(NamedTuple):
    """A dense layer. weight: [in, out]. bias: [out]."""

    weight: jax.Array
    bias: jax.Array


class RqVaeParams(NamedTuple):
    """The parameters. codebooks: for each level [K, z]."""

    encoder: tuple[Layer, ...]
    decoder: tuple[Layer, ...]
    codebooks: tuple[jax.Array, ...]


class Losses(NamedTuple):
    """Means over the batch, [] float32. taken: for each level, how often each code was chosen, [K] int32."""

    reconstruction: jax.Array
    quantization: jax.Array
    taken: tuple[jax.Array, ...]


@dataclass(frozen=True, eq=False)
class RqVae:
    """A trained RQ-VAE.

    quantized: latents, codebooks and codes of all items, in row order. losses: [steps] float32, the whole loss before
    each step. error: the items' squared reconstruction error as a share of their variance.
    """

    params: RqVaeParams
    quantized: Quantized
    losses: Float32
    error: float


def train_rq_vae(
    vectors: Float32, config: RqVaeConfig, progress: Progress = lambda done, total, status: None
) -> RqVae:
    """Train on item vectors [n, e], finite, not all equal. progress(steps done, steps, status): called now and then."""
    scaled = _standardised(vectors)
    optimizer = _optimizer(config)
    params = initialize(config, scaled[batch_rows(config, len(scaled), 0)])
    state = optimizer.init(params)
    losses, taken = [], _no_counts(params)
    for step in range(config.steps):
        batch = scaled[batch_rows(config, len(scaled), step)]
        params, state, loss, parts = _train_step(params, state, batch, config=config)
        losses.append(loss)
        taken = [before + now for before, now in zip(taken, parts.taken, strict=True)]
        # Not at the very end: a code that has just moved would be used without any training.
        if (step + 1) % config.reseed_every == 0 and step + config.reseed_every < config.steps:
            params = reseed_dead(params, taken, batch, np.random.default_rng((config.seed, _RESEED, step)))
            taken = _no_counts(params)
        if (step + 1) % _NOTE_EVERY == 0 or step + 1 == config.steps:
            progress(step + 1, config.steps, f"loss {float(loss):.4f}")
    quantized = quantize(_in_blocks(_encode, params, scaled), tuple(map(np.asarray, params.codebooks)))
    words = quantized.points - quantized.residual(len(config.sizes))
    left = np.square(_in_blocks(_decode, params, words) - scaled).sum(dtype=np.float64)
    error = float(left / np.square(scaled).sum(dtype=np.float64))
    return RqVae(params, quantized, np.array(losses, np.float32), error)


def _in_blocks(
    function: Callable[[RqVaeParams, Float32], jax.Array], params: RqVaeParams, rows: Float32
) -> Float32:
    step = _ROWS_AT_ONCE
    return np.concatenate(
        [np.asarray(function(params, rows[i : i + step])) for i in range(0, len(rows), step)]
    )


def _standardised(vectors: Float32) -> Float32:
    centred = vectors - vectors.mean(axis=0, dtype=np.float64)
    scale = float(np.sqrt(np.square(centred).mean()))
    if not np.isfinite(scale) or scale == 0:
        raise SemanticIdError("rqvae: the item vectors are all the same, or not finite")
    scaled: Float32 = (centred / scale).astype(np.float32)
    return scaled


def batch_rows(config: RqVaeConfig, n: int, step: int) -> Int64:
    """The rows of a step's batch, [min(batch, n)]. An epoch is a permutation; its last, incomplete batch is skipped."""
    size = min(config.batch, n)
    epoch, position = divmod(step, n // size)
    order = np.random.default_rng((config.seed, _SHUFFLE, epoch)).permutation(n)
    return order[position * size : (position + 1) * size]


def initialize(config: RqVaeConfig, batch: Float32) -> RqVaeParams:
    """Draw random MLPs that keep the variance; the codebooks are a residual k-means of the batch's latents."""
    widths = (batch.shape[1], *config.hidden, config.latent)
    rng = np.random.default_rng((config.seed, _WEIGHTS))
    encoder, decoder = _mlp(rng, widths), _mlp(rng, widths[::-1])
    bare = RqVaeParams(encoder, decoder, ())
    found = residual_kmeans(np.asarray(_encode(bare, batch)), config.sizes, seed=config.seed)
    return bare._replace(codebooks=tuple(jnp.asarray(book) for book in found.codebooks))


def _mlp(rng: np.random.Generator, widths: Sequence[int]) -> tuple[Layer, ...]:
    gains = [2.0] * (len(widths) - 2) + [
        1.0
    ]  # a ReLU, which halves the variance, follows all but the last layer
    layers = []
    for gain, i, o in zip(gains, widths[:-1], widths[1:], strict=True):
        weight = rng.standard_normal((i, o), np.float32) * np.float32((gain / i) ** 0.5)
        layers.append(Layer(jnp.asarray(weight), jnp.zeros(o)))
    return tuple(layers)


def _apply(layers: tuple[Layer, ...], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer.weight + layer.bias)
    return x @ layers[-1].weight + layers[-1].bias


@jax.jit
def _encode(params: RqVaeParams, x: jax.typing.ArrayLike) -> jax.Array:
    return _apply(params.encoder, jnp.asarray(x))


@jax.jit
def _decode(params: RqVaeParams, z: jax.typing.ArrayLike) -> jax.Array:
    return _apply(params.decoder, jnp.asarray(z))


def rq_vae_loss(params: RqVaeParams, x: jax.Array, beta: float) -> tuple[jax.Array, Losses]:
    """The loss of a batch x, [b, e], as a mean over the batch, and its parts."""
    sg = jax.lax.stop_gradient
    z = residual = _apply(params.encoder, x)
    quantization = jnp.zeros(())
    taken = []
    for book in params.codebooks:
        codes = _nearest(residual, book)
        word = book[codes]
        ours = jnp.square(sg(residual) - word).sum(-1).mean()
        theirs = jnp.square(residual - sg(word)).sum(-1).mean()
        quantization = quantization + ours + beta * theirs
        taken.append(jnp.zeros(len(book), jnp.int32).at[codes].add(1))
        residual = residual - sg(word)
    # z - residual is the sum of the codewords; the straight-through estimator gives its gradient to z unchanged.
    decoded = _apply(params.decoder, z + sg(-residual))
    reconstruction = jnp.square(x - decoded).sum(-1).mean()
    return reconstruction + quantization, Losses(reconstruction, quantization, tuple(taken))


def _nearest(residual: jax.Array, book: jax.Array) -> jax.Array:
    return jnp.argmin(0.5 * jnp.square(book).sum(-1) - residual @ book.T, axis=-1)


def _optimizer(config: RqVaeConfig) -> optax.GradientTransformation:
    warm = optax.linear_schedule(0.0, config.learning_rate, min(50, config.steps))
    return optax.adamw(warm, weight_decay=1e-4)


@functools.partial(jax.jit, static_argnames="config")
def _train_step(
    params: RqVaeParams, state: Any, batch: jax.Array, *, config: RqVaeConfig
) -> tuple[RqVaeParams, Any, jax.Array, Losses]:
    value, gradients = jax.value_and_grad(rq_vae_loss, has_aux=True)(params, batch, config.beta)
    updates, state = _optimizer(config).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, *value


def _no_counts(params: RqVaeParams) -> list[npt.NDArray[np.int32] | jax.Array]:
    return [np.zeros(len(book), np.int32) for book in params.codebooks]


def reseed_dead(
    params: RqVaeParams,
    taken: Sequence[npt.NDArray[np.int32] | jax.Array],
    batch: Float32,
    rng: np.random.Generator,
) -> RqVaeParams:
    """Move unused codes to residuals of the batch, drawn without repeats, level by level.

    taken: for each level [K], how often each code was used. Unused codes beyond the batch's rows stay as they are.
    """
    residual = np.asarray(_encode(params, batch))
    books = []
    for book, counts in zip(params.codebooks, taken, strict=True):
        moved = np.array(book)
        dead = np.flatnonzero(np.asarray(counts) == 0)[: len(residual)]
        moved[dead] = residual[rng.choice(len(residual), len(dead), replace=False)]
        books.append(jnp.asarray(moved))
        residual = quantize(residual, [moved]).residual(1)
    return params._replace(codebooks=tuple(books))
