# SPDX-License-Identifier: Apache-2.0
"""Beam search over a catalog as one would write it by hand in PyTorch: the stronger baseline.

Prompt keys and values are computed and kept once for all beams, the beams' own keys and values are beside them, and
the legal continuations are found by two gathers in the catalog's flat prefix tree. What it does not have is one
compiled program: every operation is dispatched by the host. Qwen3 only, batch 1, float32, normalize="full".

Letters: T tokens, W beams, D hidden, H heads, K key/value heads, G = H / K, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.prefix_tree import PrefixTree
from jgr.models.decoder import DecoderConfig

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Tensor = Any


class TorchShared:
    """weights: by Hugging Face name. level_tokens: per level, the model's token of each code."""

    def __init__(
        self,
        torch: Any,
        cfg: DecoderConfig,
        weights: Mapping[str, Tensor],
        tree: PrefixTree,
        level_tokens: tuple[Int32, ...],
    ) -> None:
        if cfg.family != "qwen3" or cfg.tied:
            raise ValueError(f"only untied Qwen3 models, not {cfg}")
        self._torch, self._cfg, self._weights, self._max_degrees = torch, cfg, weights, tree.max_degrees
        self._offsets = [torch.from_numpy(o).long() for o in tree.offsets]
        self._codes = [torch.from_numpy(c).long() for c in tree.codes]
        self._tokens = [torch.from_numpy(t).long() for t in level_tokens]
        self._layers = [self._fused(i) for i in range(cfg.layers)]
        half = cfg.head_dim // 2
        self._frequencies = cfg.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)

    def _fused(self, layer: int) -> dict[str, Tensor]:
        """One matrix for q, k, v and one for gate and up."""

        def weight(name: str) -> Tensor:
            return self._weights[f"model.layers.{layer}.{name}.weight"]

        qkv = self._torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"])
        gate_up = self._torch.cat([weight(f"mlp.{name}_proj") for name in ("gate", "up")])
        return {
            "qkv": qkv,
            "gate_up": gate_up,
            "down": weight("mlp.down_proj"),
            "o": weight("self_attn.o_proj"),
            "q_norm": weight("self_attn.q_norm"),
            "k_norm": weight("self_attn.k_norm"),
            "attention_norm": weight("input_layernorm"),
            "mlp_norm": weight("post_attention_layernorm"),
        }

    def recommend(self, prompt: Int32, width: int) -> tuple[Int32, Float32]:
        """Leaves [m] and their log-likelihoods [m], best first, m <= width."""
        torch = self._torch
        with torch.inference_mode():
            tokens = torch.from_numpy(prompt).long()
            hidden, shared = self._prefill(tokens)
            scores, nodes = torch.zeros(1), torch.zeros(1, dtype=torch.long)
            own: list[tuple[Tensor, Tensor]] = []
            for level in range(len(self._codes)):
                if level > 0:
                    chosen = self._tokens[level - 1][self._codes[level - 1][nodes]]
                    hidden = self._decode(chosen, len(prompt) + level - 1, shared, own)
                parents, scores, nodes = self._step(level, hidden, scores, nodes, width)
                own = [(k[:, :, parents], v[:, :, parents]) for k, v in own]
            return nodes.numpy().astype(np.int32), scores.numpy()

    def _step(
        self, level: int, hidden: Tensor, scores: Tensor, nodes: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of all beams: (beam each one descends from, score, node)."""
        torch = self._torch
        logits = hidden @ self._weights["lm_head.weight"].T
        slots = torch.arange(self._max_degrees[level])
        first, end = self._offsets[level][nodes], self._offsets[level][nodes + 1]
        children = first[:, None] + slots
        own = children < end[:, None]
        children = children.clamp(max=len(self._codes[level]) - 1)
        legal = logits.gather(1, self._tokens[level][self._codes[level][children]])
        totals = scores[:, None] + legal - torch.logsumexp(logits, 1, keepdim=True)
        totals = totals.masked_fill(~own, -torch.inf).flatten()
        best, flat = totals.topk(min(width, int(own.sum())))
        return flat // len(slots), best, children.flatten()[flat]

    def _prefill(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last token's hidden state [1, D], and per layer keys and values [K, T, d]."""
        torch, cfg = self._torch, self._cfg
        rotation = self._rotation(torch.arange(len(tokens)))
        h = self._weights["model.embed_tokens.weight"][tokens]
        shared = []
        for layer in self._layers:
            q, k, v = (x.transpose(0, 1) for x in self._qkv(layer, h, rotation))
            out = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, enable_gqa=cfg.heads != cfg.kv_heads
            )
            h = self._close(layer, h, out[0].transpose(0, 1))
            shared.append((k.contiguous(), v.contiguous()))
        return self._norm(h[-1:], self._weights["model.norm.weight"]), shared

    def _decode(
        self,
        tokens: Tensor,
        position: int,
        shared: list[tuple[Tensor, Tensor]],
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One token a beam: hidden [W, D]. Appends this step to `own`, per layer keys and values [K, S, W, d]."""
        torch, cfg = self._torch, self._cfg
        width, groups = len(tokens), cfg.heads // cfg.kv_heads
        rotation = self._rotation(torch.full((width,), position))
        h = self._weights["model.embed_tokens.weight"][tokens]
        for i, (layer, (shared_k, shared_v)) in enumerate(zip(self._layers, shared, strict=True)):
            q, k, v = self._qkv(layer, h, rotation)
            step = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
            if i == len(own):
                own.append(step)
            else:
                own[i] = tuple(torch.cat(pair, dim=1) for pair in zip(own[i], step, strict=True))
            own_k, own_v = own[i]
            q = q.reshape(width, cfg.kv_heads, groups, cfg.head_dim).permute(1, 2, 0, 3) * cfg.head_dim**-0.5
            to_prompt = (q.flatten(1, 2) @ shared_k.transpose(1, 2)).unflatten(1, (groups, width))
            to_own = torch.einsum("kgwd,kswd->kgws", q, own_k)
            attention = torch.softmax(torch.cat((to_prompt, to_own), dim=-1), dim=-1)
            n = shared_k.shape[1]
            out = (attention[..., :n].flatten(1, 2) @ shared_v).unflatten(1, (groups, width))
            out = out + torch.einsum("kgws,kswd->kgwd", attention[..., n:], own_v)
            h = self._close(layer, h, out.permute(2, 0, 1, 3))
        return self._norm(h, self._weights["model.norm.weight"])

    def _qkv(self, layer: dict[str, Tensor], h: Tensor, rotation: tuple[Tensor, Tensor]) -> list[Tensor]:
        """h [n, D] -> q [n, H, d], k and v [n, K, d], rotated."""
        cfg = self._cfg
        x = self._norm(h, layer["attention_norm"]) @ layer["qkv"].T
        q, k, v = x.unflatten(1, (-1, cfg.head_dim)).split((cfg.heads, cfg.kv_heads, cfg.kv_heads), dim=1)
        q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        return [self._rotate(q, rotation), self._rotate(k, rotation), v]

    def _close(self, layer: dict[str, Tensor], h: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and feed-forward block, each added to h [n, D]."""
        h = h + attended.reshape(len(h), -1) @ layer["o"].T
        gate, up = (self._norm(h, layer["mlp_norm"]) @ layer["gate_up"].T).chunk(2, dim=1)
        return h + (self._torch.nn.functional.silu(gate) * up) @ layer["down"].T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._torch.nn.functional.rms_norm(x, weight.shape, weight, self._cfg.norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()

    def _rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rotation
        a, b = x.chunk(2, dim=-1)
        return self._torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
