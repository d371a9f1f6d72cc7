# SPDX-License-Identifier: Apache-2.0
"""The least that a dense decoder must compute and read. Benchmarks compare what a machine achieves with it.

Multiply-adds count twice; norms, rotations and softmax are left out. Letters as in jgr.models.decoder.
"""

from __future__ import annotations

from typing import NamedTuple

from jgr.models import decoder, params
from jgr.models.decoder import DecoderConfig


class Work(NamedTuple):
    """flops: floating-point operations; bytes: of weights, keys and values, each read once where it is needed."""

    flops: float
    bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time at these rates: that of the FLOPs or that of the bytes, whichever is longer."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def weights(cfg: DecoderConfig) -> int:
    """The number of weights in all matrices but the embedding's and the output's."""
    vocabulary = cfg.vocab_size * cfg.hidden * (1 if cfg.tied else 2)
    return params.count(decoder.spec(cfg)) - vocabulary


def kv_bytes(cfg: DecoderConfig, tokens: int, itemsize: int) -> int:
    """The bytes of the keys and values of `tokens` tokens."""
    return 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * tokens * itemsize


def prefill(cfg: DecoderConfig, batch: int, tokens: int, itemsize: int) -> Work:
    """Prompts of `tokens` tokens each, causal, without the output head. Of the last layer only keys and values are
    needed of all tokens; the rest of it is counted for the last token alone."""
    attended = (cfg.layers - 1) * tokens * (tokens + 1) / 2 + tokens
    attention = 4 * cfg.heads * cfg.head_dim * attended
    unread = 2 * cfg.hidden * cfg.heads * cfg.head_dim + 3 * cfg.hidden * cfg.mlp
    flops = batch * (2 * weights(cfg) * tokens - 2 * unread * (tokens - 1) + attention)
    return Work(flops, itemsize * weights(cfg) + batch * kv_bytes(cfg, tokens, itemsize))


def decode(cfg: DecoderConfig, batch: int, width: int, tokens: int, own: int, itemsize: int) -> Work:
    """A decode of one token for each beam; the token sees the prompt and `own` tokens of its beam."""
    attention = 4 * cfg.layers * cfg.heads * cfg.head_dim * (tokens + own)
    flops = batch * width * (2 * weights(cfg) + attention)
    keys = batch * (kv_bytes(cfg, tokens, itemsize) + width * kv_bytes(cfg, own, itemsize))
    return Work(flops, itemsize * weights(cfg) + keys)


def head(cfg: DecoderConfig, rows: int, columns: int, itemsize: int) -> Work:
    """The output head: the product of `rows` hidden states and `columns` columns of the output matrix."""
    return Work(2.0 * rows * columns * cfg.hidden, float(itemsize * columns * cfg.hidden))


def total(*parts: Work) -> Work:
    return Work(sum(part.flops for part in parts), sum(part.bytes for part in parts))
