# SPDX-License-Identifier: Apache-2.0
"""The shared stage in Triton's own language, which its interpreter runs on a CPU too (TRITON_INTERPRET=1)."""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(-1e30)  # as in tools.shared_stage, which a kernel cannot import


@triton.jit
def _step(
    at, running_top, total, out, q, k_start, v_start, stop,
    kv_heads: tl.constexpr, dim: tl.constexpr, tokens: tl.constexpr, scale: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax over the tokens from `at`."""
    token = at + tl.arange(0, tokens)
    offsets = token[:, None] * (kv_heads * dim) + tl.arange(0, dim)[None, :]
    if masked:
        k = tl.load(k_start + offsets, mask=(token < stop)[:, None], other=0.0)
        v = tl.load(v_start + offsets, mask=(token < stop)[:, None], other=0.0)
    else:
        k = tl.load(k_start + offsets)
        v = tl.load(v_start + offsets)
    scores = tl.dot(q, tl.trans(k)) * scale
    if masked:
        scores = tl.where((token < stop)[None, :], scores, NOTHING)
    top = tl.maximum(running_top, tl.max(scores, axis=1))
    shrink = tl.exp2(running_top - top)
    weights = tl.exp2(scores - top[:, None])
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    return top, total * shrink + tl.sum(weights, axis=1), out


@triton.jit
def shared_stage(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, lse_ptr,
    batch: tl.constexpr, kv_heads: tl.constexpr, all_rows: tl.constexpr, room: tl.constexpr, dim: tl.constexpr,
    rows: tl.constexpr, tokens: tl.constexpr, splits: tl.constexpr, scale: tl.constexpr,
):  # fmt: skip
    """One program: `rows` rows of a key/value head, over one part of a prompt. See tools.shared_stage."""
    request = tl.program_id(2)
    kv_head, split = tl.program_id(1) // splits, tl.program_id(1) % splits
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    length = tl.minimum(tl.load(lengths_ptr + request), room)
    part = tl.cdiv(tl.cdiv(length, splits), tokens) * tokens
    start = split * part
    stop = tl.maximum(start, tl.minimum(start + part, length))

    first_row = (request * kv_heads + kv_head).to(tl.int64) * all_rows
    here = row[:, None] * dim + tl.arange(0, dim)[None, :]
    real = row < all_rows
    q = tl.load(q_ptr + first_row * dim + here, mask=real[:, None], other=0.0)
    first_token = (request.to(tl.int64) * room * kv_heads + kv_head) * dim
    top = tl.full((rows,), NOTHING, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    out = tl.zeros((rows, dim), tl.float32)
    whole = start + (stop - start) // tokens * tokens
    for at in range(start, whole, tokens):
        top, total, out = _step(
            at, top, total, out, q, k_ptr + first_token, v_ptr + first_token, stop,
            kv_heads, dim, tokens, scale, False,
        )  # fmt: skip
    if whole < stop:
        top, total, out = _step(
            whole, top, total, out, q, k_ptr + first_token, v_ptr + first_token, stop,
            kv_heads, dim, tokens, scale, True,
        )  # fmt: skip

    first_row += split.to(tl.int64) * batch * kv_heads * all_rows
    tl.store(lse_ptr + first_row + row, tl.where(total > 0, top + tl.log2(total), NOTHING), mask=real)
    total = tl.where(total > 0, total, 1.0)  # a part without tokens: zeros, of no weight in the merge
    tl.store(out_ptr + first_row * dim + here, out / total[:, None], mask=real[:, None])
