# SPDX-License-Identifier: Apache-2.0
"""Rankings that the model writes as a list (the way of RcLLM's paper): after the prompts of a packed row, the label of
the best candidate, then of the best of the others with the first label read, and so on to the last.

Every label is one token, and only labels of the request's own candidates that are not written yet may follow. The row
and the pool are those of `jgr.models.packed`, and what is written sees what the end of the instruction sees.

Letters: R requests, M candidates, S tokens of the row, cached ones first, L layers, K key/value heads, d head size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jgr.models import decoder
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.kv import BeamKV, ContextKV
from jgr.models.packed import Asked, ChosenBy, Decided, KVCells, Row, forward, read_layer
from jgr.models.rope import rope
from jgr.ops import split

_MASKED = -1e30


class WrittenKV(NamedTuple):
    """The written labels' keys and values, as `decoder.decode` goes on with them. k, v: [L, R, M, K, d]; at: [L], all
    equal: how many are written. As a layer's own they have no first axis."""

    k: Any
    v: Any
    at: Any

    def of_layer(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A layer's keys and values with one more; k, v: [R, 1, K, d]."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=self.at, axis=1)
        return put(self.k, k), put(self.v, v)

    def plus(self, k: jax.Array, v: jax.Array) -> WrittenKV:
        """k, v: [L, R, 1, K, d]."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=self.at[0], axis=2)
        return WrittenKV(put(self.k, k), put(self.v, v), self.at + 1)


@functools.partial(jax.jit, static_argnames=("cfg", "kv", "chosen_by", "requests"))
def rank(
    params: DecoderParams,
    pool: jax.Array,
    row: Row,
    asked: Asked,
    decided: Decided | None = None,
    *,
    cfg: DecoderConfig,
    kv: KVCells,
    chosen_by: ChosenBy = "deviation",
    requests: int,
) -> tuple[jax.Array, ContextKV]:
    """Rank the candidates of a batch by lists: scores [M] float32, and the new tokens' KV, see `packed.rank`.

    A candidate's score is the number of candidates behind it in the list, plus the probability of its label when it was
    written, among those that were left. So it orders the candidates as the list does. requests: R.
    """
    hidden, new, row = forward(params, pool, row, asked.places, cfg, kv, chosen_by, decided)
    with jax.named_scope("list"):
        real = asked.negative_columns < 0  # padding asks for token 0 less token 0
        of = jnp.where(real, row.described.request[asked.places], -1)
        mine = of == jnp.arange(requests)[:, None]  # [R, M]
        first = jnp.argmax(mine, axis=1)
        start = row.described.position[asked.places[first]] + 1
        context, request = _context(pool, row, new, cfg, kv)
        sees = request == jnp.arange(requests)[:, None]  # [R, S]
        columns = split.rows(params.output_rows, asked.columns).astype(jnp.float32)
        none = jnp.zeros((cfg.layers, requests, len(of), *new.k.shape[2:3], cfg.head_dim), new.k.dtype)
        written = WrittenKV(none, none, jnp.zeros(cfg.layers, jnp.int32))
        lengths = mine.sum(1, dtype=jnp.int32)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
            _, own_k, own_v, at = rest
            return _attend(q[:, 0], (k, v), sees, (own_k, own_v), at)[:, None]

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            number, h, left, scores, written = state
            logits = jnp.where(left, h.astype(jnp.float32) @ columns.T, _MASKED)
            chosen, go_on = jnp.argmax(logits, axis=1), left.any(1)
            probability = jax.nn.softmax(logits, axis=1)[jnp.arange(requests), chosen]
            at = jnp.where(go_on, chosen, len(of))
            scores = scores.at[at].set(lengths - 1 - number + probability, mode="drop")
            left = left.at[jnp.arange(requests), at].set(False, mode="drop")
            found, after = decoder.decode(
                params,
                cfg,
                asked.columns[chosen][:, None],
                context,
                lengths,
                cast(BeamKV, written),  # which counts its steps by the length of k
                number,
                start=start + number - cfg.layers,
                attention=attend,
            )
            return number + 1, found[:, 0], left, scores, after

        begin = jnp.int32(0), hidden[first], mine, jnp.zeros(len(of), jnp.float32), written
        scores = jax.lax.while_loop(lambda state: state[0] < lengths.max(), step, begin)[3]
        return scores, new


def _context(
    pool: jax.Array, row: Row, new: ContextKV, cfg: DecoderConfig, kv: KVCells
) -> tuple[ContextKV, jax.Array]:
    """The keys and values of all tokens of the row, [L, K, S, d], and the request that each is part of, [S]: for a
    token that was computed in another request than the one that sees it, the latter."""
    turn = None if row.shift is None else decoder.rotations(cfg, row.shift)

    def of_layer(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = read_layer(pool, row.slots, row.cached.request >= 0, number, kv, cfg)
        keys = found[:, 0] if turn is None else rope(found[:, 0], *turn)
        return keys.swapaxes(0, 1), found[:, 1].swapaxes(0, 1)

    cached = jax.lax.map(of_layer, jnp.arange(cfg.layers))
    both = (jnp.concatenate([old, own[:, 0]], axis=2) for old, own in zip(cached, new, strict=True))
    request = row.described.request
    if row.seen_by is not None:
        request = jnp.where(row.seen_by >= 0, row.seen_by, request)
    return ContextKV(*both), jnp.concatenate([row.cached.request, request])


def _attend(
    q: jax.Array,
    context: tuple[jax.Array, jax.Array],
    sees: jax.Array,
    own: tuple[jax.Array, jax.Array],
    at: jax.Array,
) -> jax.Array:
    """The attention of one token a request, q [R, H, d], to those of the row that it sees, [R, S], and to the labels
    that are written, of which its own is number `at`. Returns [R, H, d]."""
    (k, v), (own_k, own_v) = context, own
    grouped = q.reshape(len(q), k.shape[0], -1, q.shape[2]).astype(jnp.float32) * q.shape[2] ** -0.5
    of_row = jnp.einsum("rkgd,ksd->rkgs", grouped, k.astype(jnp.float32))
    of_own = jnp.einsum("rkgd,rmkd->rkgm", grouped, own_k.astype(jnp.float32))
    of_row = jnp.where(sees[:, None, None], of_row, _MASKED)
    of_own = jnp.where(jnp.arange(of_own.shape[3]) <= at, of_own, _MASKED)
    weights = jax.nn.softmax(jnp.concatenate([of_row, of_own], axis=3), axis=3)
    found = jnp.einsum("rkgs,ksd->rkgd", weights[..., : k.shape[1]], v.astype(jnp.float32))
    found += jnp.einsum("rkgm,rmkd->rkgd", weights[..., k.shape[1] :], own_v.astype(jnp.float32))
    return found.reshape(q.shape).astype(q.dtype)
