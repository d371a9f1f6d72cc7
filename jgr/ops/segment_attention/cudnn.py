# SPDX-License-Identifier: Apache-2.0
"""Plain causal prompts in 16 bits by cuDNN, which has Hopper's own instructions; the Triton dialect has not.

The plan of such a call is made on the device, so that nothing is compiled with it where there is none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.dispatch import target_platform
from jgr.ops.segment_attention.visibility import Arguments, Causal

_MAX_HEAD = 128


def supports(call: Arguments) -> str | None:
    """Why cuDNN cannot run, or None."""
    dim, dtype = call.q.shape[-1], call.q.dtype
    if not (call.triangle and isinstance(call.tokens, Causal) and call.q.shape[1] == call.k.shape[2]):
        return "it is only for plain causal prompts without a context"
    if dim % 8 or dim > _MAX_HEAD:
        return f"the head size is {dim}, not a multiple of 8 up to {_MAX_HEAD}"
    if dtype not in (jnp.bfloat16, jnp.float16) or not call.k.dtype == call.v.dtype == dtype:
        return (
            f"queries, keys and values are {dtype}, {call.k.dtype} and {call.v.dtype}, not of one 16-bit type"
        )
    if target_platform() != "gpu" or jax.default_backend() != "gpu":
        return "there is no GPU here"
    if not jax.devices()[0].device_kind.startswith("NVIDIA"):
        return f"the device is {jax.devices()[0].device_kind}"
    return None


def segment_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention."""
    assert isinstance(call.tokens, Causal)
    k, v = (x.swapaxes(1, 2) for x in (call.k, call.v))
    # What is before the padding does not see it, so its length needs no telling, which would cost a fifth of the time.
    # But a weight of zero does not remove what it may hold, such as NaN.
    real = jnp.arange(v.shape[1]) < call.tokens.lengths[:, None]
    v = jnp.where(real[:, :, None, None], v, jnp.zeros((), v.dtype))
    out: jax.Array = jax.nn.dot_product_attention(call.q, k, v, is_causal=True, implementation="cudnn")
    return out
