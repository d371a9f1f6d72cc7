# SPDX-License-Identifier: Apache-2.0
"""Staged beam attention as a GPU kernel (XGR-5): the beams of a request are the rows of one matmul with its prompt.

One program owns `block_rows` rows; a row is a beam and a query head of the program's key/value head. An online softmax
begins with the own stage, the few generated tokens of each beam, and goes on with a loop over the prompt's blocks up to
the request's length. So nothing has to be merged, and no row sees nothing. Where there are too few rows to fill the
device, several programs share a prompt (`splits`): each leaves the output and the log-sum-exp of its part, and a second
kernel computes the own stage and merges the parts into it.

Invariants: rows after the last one repeat it, so no store needs a mask; what stands after a request's last token is
never loaded; scores and accumulators are float32 in units of log2.

Letters: B batch, W beams, H heads, K key/value heads, G = H / K, T prompt tokens, S slots, d head size, R block_rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jgr.ops.beam_attention.arguments import Arguments
from jgr.ops.beam_attention.config import Config, Shape, choose_config
from jgr.ops.pieces import Pieces, pieces_of

_NOTHING = -1e30  # a running maximum before the first score; finite, so that differences are never NaN
_MAX_SLOTS = 8
_MAX_ELEMENTS = 2**31 - 1  # the kernel's offsets are int32

Running = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]
"""State of an online softmax: maximum [R], sum [R], and the weighted values of each piece of the head [R, size]."""


def supports(call: Arguments) -> str | None:
    """Why the kernel cannot run, or None."""
    q, context_k, beam_k = call.q, call.context_k, call.beam_k
    dim = q.shape[-1]
    if dim % 16 or dim > 256:
        return f"the head size is {dim}, not a multiple of 16 up to 256"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries are {q.dtype}"
    if not all(x.dtype == q.dtype for x in (context_k, call.context_v, beam_k, call.beam_v)):
        return f"keys and values are not all {q.dtype}, as the queries are"
    if context_k.shape[2] == 0:
        return "the prompt has room for no token"
    if beam_k.shape[1] > _MAX_SLOTS:
        return f"{beam_k.shape[1]} slots; the kernel unrolls at most {_MAX_SLOTS}"
    if max(math.prod(x.shape) for x in (q, context_k, beam_k)) > _MAX_ELEMENTS:
        return "an array has more elements than an int32 can count"
    return None


class _Static(NamedTuple):
    """What both kernels know at trace time."""

    width: int
    heads: int
    kv_heads: int
    dim: int
    config: Config
    interpret: bool

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    @property
    def pieces(self) -> Pieces:
        return pieces_of(self.dim)

    @property
    def scale(self) -> float:
        return math.log2(math.e) / math.sqrt(self.dim)

    @property
    def row_blocks(self) -> int:
        return -(-self.width * self.groups // self.config.block_rows)


class _Rows(NamedTuple):
    """The rows of a program: the beam of each [R], and its place in the [W * H] rows of q and out."""

    beam: jax.Array
    head: jax.Array


def _rows(block: Any, block_rows: int, width: int, groups: int, heads: int, kv_head: Any) -> _Rows:
    row = jnp.minimum(block * block_rows + jnp.arange(block_rows), width * groups - 1)
    beam = row // groups
    return _Rows(beam, beam * heads + kv_head * groups + row % groups)


def _dot(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    # One pass of TF32, a GPU's default for float32, keeps three digits; exact products do without tensor cores and
    # spill registers. An interpreted kernel needs no choice.
    tf32 = a.dtype == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if tf32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _own_stage(
    q: list[jax.Array],
    rows: _Rows,
    kv_head: Any,
    own_k_ref: Any,  # [S * W * K, d]
    own_v_ref: Any,
    ancestors_ref: Any,  # [S, W]
    static: _Static,
) -> Running:
    """Begin the softmax with each row's own slots, which are too few keys for a matmul."""
    pieces, (slots, width) = static.pieces, ancestors_ref.shape
    index = [(s * width + ancestors_ref[s, rows.beam]) * static.kv_heads + kv_head for s in range(slots)]
    scores = []
    for at in index:
        parts = [
            (q[c].astype(jnp.float32) * own_k_ref[at, pl.ds(*pieces[c])].astype(jnp.float32)).sum(axis=1)
            for c in range(len(pieces))
        ]
        scores.append(functools.reduce(jnp.add, parts) * static.scale)
    top = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp2(score - top) for score in scores]
    out = tuple(
        functools.reduce(
            jnp.add,
            [
                w[:, None] * own_v_ref[at, pl.ds(*piece)].astype(jnp.float32)
                for w, at in zip(weights, index, strict=True)
            ],
        )
        for piece in pieces
    )
    return top, functools.reduce(jnp.add, weights), out


def _shared_stage(
    q: list[jax.Array],
    k_ref: Any,  # [T, d]
    v_ref: Any,
    start: Any,
    stop: Any,
    running: Running,
    static: _Static,
) -> Running:
    """Go on with the softmax over the prompt's tokens start .. stop - 1; start is a multiple of the block."""
    pieces, block_tokens = static.pieces, static.config.block_tokens

    def step(i: Any, running: Running, masked: bool) -> Running:
        top, total, out = running
        at = pl.ds(i * block_tokens, block_tokens)
        real = i * block_tokens + jnp.arange(block_tokens) < stop

        def load(ref: Any, piece: tuple[int, int]) -> jax.Array:
            if not masked:
                return ref[at, pl.ds(*piece)]  # type: ignore[no-any-return]
            return plt.load(ref.at[at, pl.ds(*piece)], mask=real[:, None], other=0.0)

        parts = [_dot(q[c], load(k_ref, piece).T, static.interpret) for c, piece in enumerate(pieces)]
        scores = functools.reduce(jnp.add, parts) * static.scale
        if masked:
            scores = jnp.where(real[None, :], scores, _NOTHING)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - new_top[:, None])
        values = (load(v_ref, piece) for piece in pieces)
        new_out = tuple(
            o * shrink[:, None] + _dot(weights.astype(v.dtype), v, static.interpret)
            for o, v in zip(out, values, strict=True)
        )
        return new_top, total * shrink + weights.sum(axis=1), new_out

    whole = jnp.maximum(stop // block_tokens, start // block_tokens)
    running = jax.lax.fori_loop(start // block_tokens, whole, functools.partial(step, masked=False), running)
    return jax.lax.fori_loop(  # type: ignore[no-any-return]
        whole, pl.cdiv(stop, block_tokens), functools.partial(step, masked=True), running
    )


def _empty(block_rows: int, pieces: Pieces) -> Running:
    return (
        jnp.full((block_rows,), _NOTHING, jnp.float32),
        jnp.zeros((block_rows,), jnp.float32),
        tuple(jnp.zeros((block_rows, size), jnp.float32) for _, size in pieces),
    )


def _store(out_ref: Any, rows: _Rows, running: Running, alive: jax.Array, pieces: Pieces) -> None:
    _, total, out = running
    for o, piece in zip(out, pieces, strict=True):
        value = jnp.where(alive[:, None], o / total[:, None], 0.0)
        out_ref[rows.head, pl.ds(*piece)] = value.astype(out_ref.dtype)


def _attend(
    lengths_ref: Any,  # [B]
    widths_ref: Any,  # [B]
    q_ref: Any,  # [W * H, d]
    k_ref: Any,  # [T, d]
    v_ref: Any,  # [T, d]
    own_k_ref: Any,  # [S * W * K, d]
    own_v_ref: Any,
    ancestors_ref: Any,  # [S, W]
    out_ref: Any,  # [W * H, d]
    lse_ref: Any = None,  # [W * H] where the prompt is split
    *,
    static: _Static,
) -> None:
    """Compute both stages, or with lse_ref the shared stage over one of `splits` parts of the prompt."""
    config, pieces = static.config, static.pieces
    block, request = pl.program_id(0), pl.program_id(2)
    kv_head, split = pl.program_id(1) // config.splits, pl.program_id(1) % config.splits
    rows = _rows(block, config.block_rows, static.width, static.groups, static.heads, kv_head)
    width = widths_ref[request]
    # A block of dead beams reads no prompt; so requests of few beams cost little beside one of many.
    length = jnp.minimum(lengths_ref[request], k_ref.shape[0])
    length = jnp.where(block * config.block_rows // static.groups < width, length, 0)
    q = [q_ref[rows.head, pl.ds(*piece)] for piece in pieces]
    start: Any
    stop: Any
    if lse_ref is None:
        running = _own_stage(q, rows, kv_head, own_k_ref, own_v_ref, ancestors_ref, static)
        start, stop = 0, length
    else:
        running = _empty(config.block_rows, pieces)
        part = pl.cdiv(pl.cdiv(length, config.splits), config.block_tokens) * config.block_tokens
        start = split * part
        stop = jnp.maximum(start, jnp.minimum(start + part, length))
    top, total, out = _shared_stage(q, k_ref, v_ref, start, stop, running, static)
    if lse_ref is not None:
        lse_ref[rows.head] = jnp.where(total > 0, top + jnp.log2(total), _NOTHING)
        total = jnp.where(total > 0, total, 1.0)  # a part without tokens: zeros, of no weight in the merge
    _store(out_ref, rows, (top, total, out), rows.beam < width, pieces)


def _merge(
    widths_ref: Any,  # [B]
    q_ref: Any,  # [W * H, d]
    own_k_ref: Any,  # [S * W * K, d]
    own_v_ref: Any,
    ancestors_ref: Any,  # [S, W]
    part_ref: Any,  # [splits, W * H, d] float32
    lse_ref: Any,  # [splits, W * H] float32
    out_ref: Any,  # [W * H, d]
    *,
    static: _Static,
) -> None:
    """Compute the own stage, and merge the parts of the prompt into it by their log-sum-exps."""
    pieces = static.pieces
    block, kv_head, request = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rows = _rows(block, static.config.merge_rows, static.width, static.groups, static.heads, kv_head)
    q = [q_ref[rows.head, pl.ds(*piece)] for piece in pieces]
    top, total, out = _own_stage(q, rows, kv_head, own_k_ref, own_v_ref, ancestors_ref, static)
    for split in range(static.config.splits):
        lse = lse_ref[split, rows.head]
        new_top = jnp.maximum(top, lse)
        shrink, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
        total = total * shrink + weight
        out = tuple(
            o * shrink[:, None] + weight[:, None] * part_ref[split, rows.head, pl.ds(*piece)]
            for o, piece in zip(out, pieces, strict=True)
        )
        top = new_top
    _store(out_ref, rows, (top, total, out), rows.beam < widths_ref[request], pieces)


def run(call: Arguments, config: Config | None = None, interpret: bool = False) -> jax.Array:
    """See jgr.ops.beam_attention. config: None for the chosen one. interpret: run on any platform, slowly."""
    q, context_k, context_v, lengths, beam_k, beam_v, ancestors, widths = call
    batch, width, heads, dim = q.shape
    kv_heads, tokens = context_k.shape[1:3]
    slots = beam_k.shape[1]
    rows = width * call.groups
    if config is None:
        config = choose_config(Shape(batch, kv_heads, rows, tokens, dim, q.dtype.itemsize))
    if tokens < config.block_tokens:  # a prompt shorter than a block: the loop loads whole blocks
        missing = ((0, 0), (0, 0), (0, config.block_tokens - tokens), (0, 0))
        lengths, tokens = jnp.minimum(lengths, tokens), config.block_tokens
        context_k, context_v = jnp.pad(context_k, missing), jnp.pad(context_v, missing)
    # As a prompt's layers leave them, so that there is nothing to transpose.
    context_k, context_v = (x.swapaxes(1, 2) for x in (context_k, context_v))
    static = _Static(width, heads, kv_heads, dim, config, interpret)
    if ancestors is None:
        ancestors = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, slots, width))
    if widths is None:
        widths = jnp.full((batch,), width, jnp.int32)
    q = q.reshape(batch, width * heads, dim)
    beam_k, beam_v = (x.reshape(batch, slots * width * kv_heads, dim) for x in (beam_k, beam_v))
    parameters = plt.CompilerParams(num_warps=config.warps, num_stages=config.stages)

    whole = pl.BlockSpec()
    queries = pl.BlockSpec((None, width * heads, dim), lambda r, h, b: (b, 0, 0))
    prompt = pl.BlockSpec((None, tokens, None, dim), lambda r, h, b: (b, 0, h // config.splits, 0))
    own = pl.BlockSpec((None, slots * width * kv_heads, dim), lambda r, h, b: (b, 0, 0))
    table = pl.BlockSpec((None, slots, width), lambda r, h, b: (b, 0, 0))
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)

    split = config.splits > 1
    part = pl.BlockSpec((None, None, width * heads, dim), lambda r, h, b: (h % config.splits, b, 0, 0))
    part_lse = pl.BlockSpec((None, None, width * heads), lambda r, h, b: (h % config.splits, b, 0))
    parts = jax.ShapeDtypeStruct((config.splits, *q.shape), jnp.float32)
    lses = jax.ShapeDtypeStruct((config.splits, *q.shape[:2]), jnp.float32)
    attend = pl.pallas_call(
        functools.partial(_attend, static=static),
        grid=(static.row_blocks, kv_heads * config.splits, batch),
        in_specs=[whole, whole, queries, prompt, prompt, own, own, table],
        out_specs=(part, part_lse) if split else queries,
        out_shape=(parts, lses) if split else out,
        compiler_params=parameters,
        interpret=interpret,
        name="beam_attention",
    )
    result: Any = attend(lengths, widths, q, context_k, context_v, beam_k, beam_v, ancestors)
    if split:
        all_parts = pl.BlockSpec((config.splits, None, width * heads, dim), lambda r, h, b: (0, b, 0, 0))
        all_lses = pl.BlockSpec((config.splits, None, width * heads), lambda r, h, b: (0, b, 0))
        merge = pl.pallas_call(
            functools.partial(_merge, static=static),
            grid=(-(-rows // config.merge_rows), kv_heads, batch),
            in_specs=[whole, queries, own, own, table, all_parts, all_lses],
            out_specs=queries,
            out_shape=out,
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="beam_attention_merge",
        )
        result = merge(widths, q, beam_k, beam_v, ancestors, *result)
    return result.reshape(batch, width, heads, dim)  # type: ignore[no-any-return]


def beam_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.beam_attention."""
    return run(call)


def interpreted(call: Arguments) -> jax.Array:
    """See jgr.ops.beam_attention. Runs the kernel step by step, on any platform."""
    return run(call, interpret=True)
