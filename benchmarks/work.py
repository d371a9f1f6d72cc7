# SPDX-License-Identifier: Apache-2.0
"""The least that a dense decoder must compute and read: what benchmarks divide a machine's rates by.

Multiply-adds count twice; norms, rotations and softmax are left out. Letters as in jgr.models.decoder.
"""

from __future__ import annotations

from typing import NamedTuple

from jgr.models import decoder, params
from jgr.models.decoder import DecoderConfig


class Work(NamedTuple):
    """flops; bytes: weights and keys and values, each read once where it is needed."""

    flops: float
    bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The larger of both floors."""
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


def weights(cfg: DecoderConfig) -> int:
    """Of all matrices but the embedding and the output's."""
    vocabulary = cfg.vocab_size * cfg.hidden * (1 if cfg.tied else 2)
    return params.count(decoder.spec(cfg)) - vocabulary


def kv_bytes(cfg: DecoderConfig, tokens: int, itemsize: int) -> int:
    """Keys and values of so many tokens."""
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
    """One token for each beam, which sees the prompt and `own` tokens of its own."""
    attention = 4 * cfg.layers * cfg.heads * cfg.head_dim * (tokens + own)
    flops = batch * width * (2 * weights(cfg) + attention)
    keys = batch * (kv_bytes(cfg, tokens, itemsize) + width * kv_bytes(cfg, own, itemsize))
    return Work(flops, itemsize * weights(cfg) + keys)


def head(cfg: DecoderConfig, rows: int, columns: int, itemsize: int) -> Work:
    """So many rows times so many columns of the output matrix."""
    return Work(2.0 * rows * columns * cfg.hidden, float(itemsize * columns * cfg.hidden))


def total(*parts: Work) -> Work:
    return Work(sum(part.flops for part in parts), sum(part.bytes for part in parts))
