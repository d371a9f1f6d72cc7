# SPDX-License-Identifier: Apache-2.0
"""A dense decoder in numpy and float64, with any mask: a reference that shares no code with jgr."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jgr.models.decoder import DecoderConfig, DecoderParams

Float64 = npt.NDArray[np.float64]


class Dense:
    """One layer at a time: rows of hidden states over given keys and values."""

    def __init__(self, cfg: DecoderConfig, params: DecoderParams) -> None:
        self.cfg = cfg
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def embed(self, tokens: Any) -> Float64:
        found: Float64 = self.w.embed[tokens]
        return found

    def project(self, layer: int, h: Float64, position: Any) -> tuple[Float64, Float64, Float64]:
        """q, k, v: [T, heads, d], rotated."""
        w = self.w.layers
        x = self._norm(h, w.attention_norm[layer])
        q, k, v = (
            (x @ matrix[layer]).reshape(len(x), -1, self.cfg.head_dim) for matrix in (w.wq, w.wk, w.wv)
        )
        return (
            self._rotate(self._norm(q, w.q_norm[layer]), position),
            self._rotate(self._norm(k, w.k_norm[layer]), position),
            v,
        )

    def step(self, layer: int, h: Float64, q: Float64, k: Float64, v: Float64, mask: Any) -> Float64:
        """The layer's output for the rows; mask: [rows, keys]."""
        w = self.w.layers
        k, v = (np.repeat(x, self.cfg.heads // self.cfg.kv_heads, axis=1) for x in (k, v))
        logits = np.where(mask, np.einsum("thd,shd->hts", q, k) / math.sqrt(self.cfg.head_dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        h = h + np.einsum("hts,shd->thd", weights, v).reshape(len(h), -1) @ w.wo[layer]
        x = self._norm(h, w.mlp_norm[layer])
        gate = x @ w.gate[layer]
        out: Float64 = h + (gate / (1 + np.exp(-gate)) * (x @ w.up[layer])) @ w.down[layer]
        return out

    def logits(self, h: Float64) -> Float64:
        out: Float64 = self._norm(h, self.w.norm) @ self.w.output_rows.T
        return out

    def run(self, tokens: Any, position: Any, mask: Any) -> list[tuple[Float64, Float64]]:
        """Keys and values of every layer."""
        return self.forward(tokens, position, mask)[0]

    def forward(self, tokens: Any, position: Any, mask: Any) -> tuple[list[tuple[Float64, Float64]], Float64]:
        """Keys and values of every layer, and the logits [T, vocabulary]. mask: [T, T], what each token sees."""
        h, found = self.embed(tokens), []
        for layer in range(self.cfg.layers):
            q, k, v = self.project(layer, h, position)
            found.append((k, v))
            h = self.step(layer, h, q, k, v, mask)
        return found, self.logits(h)

    def _norm(self, x: Float64, weight: Float64) -> Float64:
        out: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.cfg.norm_eps) * weight
        return out

    def _rotate(self, x: Float64, position: Any) -> Float64:
        half = self.cfg.head_dim // 2
        angle = np.asarray(position)[:, None, None] * self.cfg.rope_theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
        )
