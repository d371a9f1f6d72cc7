# SPDX-License-Identifier: Apache-2.0
"""Beam search as one would write it by hand in PyTorch: the stronger baseline.

Prompt keys and values are computed and kept once for all beams, the beams' own keys and values are beside them and
selected by parent, and the legal continuations are found by two gathers in the catalog's flat prefix tree. With
normalize="valid" only the level's columns of the output matrix are multiplied. What it does not have is one compiled
program: every operation is dispatched by the host. Qwen3 only, float32 or bfloat16, where logits are float32 from the
product on; beam search for batch 1.

Letters: B batch, T tokens, W beams, D hidden, H heads, K key/value heads, G = H / K, d head size.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from benchmarks.peers.lines import Message, number_type, serve, timed

Tensor = Any
Chosen = tuple[Tensor, Tensor, Tensor, Tensor]  # of each new beam: parent, score, token, node


class Model:
    """The decoder."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._dtype = getattr(torch, number_type())
        self._weights = {k: x.to(self._dtype) for k, x in load_file(folder / "model.safetensors").items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self._eps = config["head_dim"], config["rms_norm_eps"]
        self._layers = [self._fused(layer) for layer in range(config["num_hidden_layers"])]
        half = self.dim // 2
        theta = config["rope_parameters"]["rope_theta"]
        self._frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
        self.head = self._weights["lm_head.weight"]

    def _fused(self, layer: int) -> dict[str, Tensor]:
        """A layer's weights with one matrix for q, k, v and one for gate and up."""

        def weight(name: str) -> Tensor:
            return self._weights[f"model.layers.{layer}.{name}.weight"]

        return {
            "qkv": torch.cat([weight(f"self_attn.{name}_proj") for name in "qkv"]),
            "gate_up": torch.cat([weight(f"mlp.{name}_proj") for name in ("gate", "up")]),
            "down": weight("mlp.down_proj"),
            "o": weight("self_attn.o_proj"),
            "q_norm": weight("self_attn.q_norm"),
            "k_norm": weight("self_attn.k_norm"),
            "attention_norm": weight("input_layernorm"),
            "mlp_norm": weight("post_attention_layernorm"),
        }

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last tokens' hidden states [B, D] of tokens [B, T], and for each layer keys and values [B, K, T, d]."""
        rotation = self._rotation(torch.arange(tokens.shape[1]))
        h = self._weights["model.embed_tokens.weight"][tokens]
        shared = []
        for layer in self._layers:
            q, k, v = (x.transpose(1, 2) for x in self._qkv(layer, h, rotation))
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
            h = self._close(layer, h, out.transpose(1, 2))
            shared.append((k.contiguous(), v.contiguous()))
        return self._norm(h[:, -1], self._weights["model.norm.weight"]), shared

    def decode(
        self,
        tokens: Tensor,
        position: int,
        shared: list[tuple[Tensor, Tensor]],
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Decode one token a beam: hidden [W, D]. Appends to `own`, for each layer keys and values [K, S, W, d]."""
        width, groups = len(tokens), self.heads // self.kv_heads
        rotation = self._rotation(torch.full((width,), position))
        h = self._weights["model.embed_tokens.weight"][tokens]
        for i, (layer, (shared_k, shared_v)) in enumerate(zip(self._layers, shared, strict=True)):
            q, k, v = self._qkv(layer, h, rotation)
            step = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]
            if i == len(own):
                own.append(step)
            else:
                own[i] = torch.cat((own[i][0], step[0]), dim=1), torch.cat((own[i][1], step[1]), dim=1)
            own_k, own_v = own[i]
            q = q.reshape(width, self.kv_heads, groups, self.dim).permute(1, 2, 0, 3) * self.dim**-0.5
            to_prompt = (q.flatten(1, 2) @ shared_k[0].transpose(1, 2)).unflatten(1, (groups, width))
            to_own = torch.einsum("kgwd,kswd->kgws", q, own_k)
            attention = torch.softmax(torch.cat((to_prompt, to_own), dim=-1), dim=-1)
            n = shared_k.shape[2]
            out = (attention[..., :n].flatten(1, 2) @ shared_v[0]).unflatten(1, (groups, width))
            out = out + torch.einsum("kgws,kswd->kgwd", attention[..., n:], own_v)
            h = self._close(layer, h, out.permute(2, 0, 1, 3))
        return self._norm(h, self._weights["model.norm.weight"])

    def _qkv(self, layer: dict[str, Tensor], h: Tensor, rotation: tuple[Tensor, Tensor]) -> list[Tensor]:
        """q [..., H, d], k and v [..., K, d] of h [..., D]; q and k are rotated."""
        x = functional.linear(self._norm(h, layer["attention_norm"]), layer["qkv"])
        q, k, v = x.unflatten(-1, (-1, self.dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
        return [_rotate(q, rotation), _rotate(k, rotation), v]

    def _close(self, layer: dict[str, Tensor], h: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and feed-forward block, each added to h [..., D]."""
        h = h + functional.linear(attended.reshape(*h.shape[:-1], -1), layer["o"])
        gate, up = functional.linear(self._norm(h, layer["mlp_norm"]), layer["gate_up"]).chunk(2, dim=-1)
        return h + functional.linear(functional.silu(gate) * up, layer["down"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self._frequencies
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Search:
    """Beam search over everything, or over a catalog."""

    def __init__(self, folder: str, compiled: bool = False) -> None:
        self._model = Model(Path(folder))
        if compiled:
            self._model.prefill = torch.compile(self._model.prefill, dynamic=False)  # type: ignore[method-assign]
            self._model.decode = torch.compile(self._model.decode, dynamic=False)  # type: ignore[method-assign]
        arrays = np.load(f"{folder}/catalog.npz")
        self._depth = arrays["sequences"].shape[1]
        levels = range(self._depth)
        self._offsets = [torch.from_numpy(arrays[f"offsets_{level}"]).long() for level in levels]
        self._codes = [torch.from_numpy(arrays[f"codes_{level}"]).long() for level in levels]
        self._tokens = [torch.from_numpy(arrays[f"tokens_{level}"]).long() for level in levels]
        self._degrees = [int(offsets.diff().max()) for offsets in self._offsets]
        self._columns = [self._model.head[tokens].contiguous() for tokens in self._tokens]

    def answer(self, request: Message) -> Message:
        with torch.inference_mode():
            if request["op"] == "matmul":
                matrix = torch.ones(request["side"], request["side"], dtype=self._model.head.dtype)
                return {"ms": timed(lambda: matrix @ matrix, request["at_least_s"])[0]}
            tokens = torch.tensor(request["prompts"])
            if request["op"] == "first":
                ms, found = timed(functools.partial(self._first, tokens), request["at_least_s"])
                return {"ms": ms, "tokens": found.tolist()}
            run = functools.partial(self._beams, tokens, request["width"], request["mode"])
            ms, (sequences, scores) = timed(run, request["at_least_s"])
        return {"ms": ms, "sequences": sequences.tolist(), "scores": scores.tolist()}

    def _first(self, tokens: Tensor) -> Tensor:
        hidden, _ = self._model.prefill(tokens)
        return functional.linear(hidden, self._model.head).argmax(-1)

    def _beams(self, prompt: Tensor, width: int, mode: str) -> tuple[Tensor, Tensor]:
        """Sequences [m, depth] and their log-likelihoods [m], best first, m <= width."""
        hidden, shared = self._model.prefill(prompt)
        scores, nodes = torch.zeros(1), torch.zeros(1, dtype=torch.long)
        sequences = torch.zeros(1, 0, dtype=torch.long)
        own: list[tuple[Tensor, Tensor]] = []
        for level in range(self._depth):
            if level > 0:
                hidden = self._model.decode(sequences[:, -1], prompt.shape[1] + level - 1, shared, own)
            if mode == "unconstrained":
                parents, scores, tokens, nodes = self._any(hidden, scores, nodes, width)
            else:
                parents, scores, tokens, nodes = self._legal(level, hidden, scores, nodes, width, mode)
            sequences = torch.cat((sequences[parents], tokens[:, None]), dim=1)
            if level < self._depth - 1:
                own = [(k.index_select(2, parents), v.index_select(2, parents)) for k, v in own]
        return sequences, scores

    def _any(self, hidden: Tensor, scores: Tensor, nodes: Tensor, width: int) -> Chosen:
        """The best continuations of all beams: the best of each beam first, which torch finds in parallel."""
        logits = functional.linear(hidden, self._model.head).float()
        best, tokens = logits.topk(min(width, logits.shape[1]), dim=1)
        totals = (scores - torch.logsumexp(logits, 1))[:, None] + best
        best, flat = totals.flatten().topk(min(width, totals.numel()))
        parents = flat // totals.shape[1]
        return parents, best, tokens.flatten()[flat], nodes[parents]

    def _legal(
        self, level: int, hidden: Tensor, scores: Tensor, nodes: Tensor, width: int, mode: str
    ) -> Chosen:
        slots = torch.arange(self._degrees[level])
        first, end = self._offsets[level][nodes], self._offsets[level][nodes + 1]
        children = first[:, None] + slots
        own = children < end[:, None]
        codes = self._codes[level][children.clamp(max=len(self._codes[level]) - 1)]
        if mode == "valid":
            legal = functional.linear(hidden, self._columns[level]).float().gather(1, codes)
            legal = legal.masked_fill(~own, -torch.inf)
            totals = scores[:, None] + torch.log_softmax(legal, 1)
        else:
            logits = functional.linear(hidden, self._model.head).float()
            legal = logits.gather(1, self._tokens[level][codes]).masked_fill(~own, -torch.inf)
            totals = scores[:, None] + legal - torch.logsumexp(logits, 1, keepdim=True)
        best, flat = totals.flatten().topk(min(width, int(own.sum())))
        parents = flat // len(slots)
        return parents, best, self._tokens[level][codes.flatten()[flat]], children.flatten()[flat]


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(lambda folder: Search(folder).answer, ("torch",))
