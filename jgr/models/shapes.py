# SPDX-License-Identifier: Apache-2.0
"""The models that xGR was measured with, by name: architectures for work on speed, with weights drawn at random.

Qwen3's are as published, its vocabulary followed by OpenOneRec's tokens (MODEL-23). OneRec-V2's hidden size, layers
and heads are the paper's (MODEL-22). What the paper leaves open is chosen here: a plain mlp is 4 times as wide as the
hidden size, with which each model has as many parameters as its name says; the context has one key/value head, and the
self-attention as many as query heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jgr.models.decoder import DecoderConfig
from jgr.models.generators import GeneratorConfig
from jgr.models.lazy_decoder import LazyConfig

LEVELS, LEVEL_SIZE = 3, 8192
QWEN3_FIRST = 151_669
"""The first semantic-id token, which follows Qwen3's own vocabulary."""
QWEN3_VOCABULARY = 176_384
"""The size of Qwen3's vocabulary with three levels of ids, two markers, and padding."""

# hidden, layers, query heads, mlp
_QWEN3 = {
    "qwen3-0.6b": (1024, 28, 16, 3072),
    "qwen3-1.7b": (2048, 28, 16, 6144),
    "qwen3-4b": (2560, 36, 32, 9728),
}
# hidden, layers, heads
_ONEREC = {
    "onerec-v2-0.1b": (640, 12, 10),
    "onerec-v2-0.2b": (896, 12, 14),
    "onerec-v2-0.5b": (1408, 14, 11),
    "onerec-v2-1b": (1792, 18, 14),
    "onerec-v2-2b": (2304, 22, 18),
    "onerec-v2-4b": (2944, 26, 23),
    "onerec-v2-8b": (3584, 34, 28),
}
# The 0.5B with 53 routed experts and a shared one: 4 billion parameters.
_MIXTURES = {"onerec-v2-4b-moe": "onerec-v2-0.5b"}

NAMES = (*_QWEN3, *_ONEREC, *_MIXTURES)


def named(name: str) -> GeneratorConfig:
    """The architecture of this name. Raises ValueError for one that is not among NAMES."""
    if name in _QWEN3:
        return _qwen3(*_QWEN3[name])
    if name in _ONEREC:
        return _onerec(*_ONEREC[name])
    if name in _MIXTURES:
        return _onerec(*_ONEREC[_MIXTURES[name]], experts=53, expert_mlp=1408)
    raise ValueError(f"there is no model {name!r}; there are {', '.join(NAMES)}")


def level_tokens(cfg: GeneratorConfig) -> tuple[npt.NDArray[np.int32], ...]:
    """Per level [8192] int32: the tokens of a named model's semantic ids."""
    first = cfg.first_tokens[0] if isinstance(cfg, LazyConfig) else QWEN3_FIRST
    starts = range(first, first + LEVELS * LEVEL_SIZE, LEVEL_SIZE)
    return tuple(np.arange(start, start + LEVEL_SIZE, dtype=np.int32) for start in starts)


def _qwen3(hidden: int, layers: int, heads: int, mlp: int) -> DecoderConfig:
    return DecoderConfig(
        family="qwen3",
        vocab_size=QWEN3_VOCABULARY,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        mlp=mlp,
        rope_theta=1e6,
        norm_eps=1e-6,
        tied=True,
        max_position=40_960,
    )


def _onerec(hidden: int, layers: int, heads: int, *, experts: int = 0, expert_mlp: int = 0) -> LazyConfig:
    return LazyConfig(
        vocab_size=LEVELS * LEVEL_SIZE,
        first_tokens=tuple(level * LEVEL_SIZE for level in range(LEVELS)),
        level_sizes=(LEVEL_SIZE,) * LEVELS,
        max_items=3000,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=4 * hidden,
        experts=experts,
        expert_mlp=expert_mlp,
    )
