# SPDX-License-Identifier: Apache-2.0
"""The search of benchmarks/peers/pytorch_peer.py for batches in 16 bits on a GPU: what one would write by hand.

The prompt's attention is PyTorch's fused one, q, k, v and gate, up are one matrix each, prompts' keys and values are
kept once for all beams, only a level's columns of the output matrix are multiplied, and nothing asks the device before
the end. On a GPU all of a search is captured in one CUDA graph, so that the host launches nothing but that.

Compiled, a layer of the prompt and a layer of a step of the beams go through torch.compile, for every shape by itself;
what chooses the beams is torch's own kernels in either form.

Letters: B batch, T tokens, W beams, D hidden, H heads, K key/value heads, G = H / K, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

Tensor = Any
Found = tuple[Any, Any]
SHAPES = 64
"""More than are asked for: beyond its limit torch goes back to what is not compiled, without a word."""
Int32 = npt.NDArray[np.int32]


class Shape(NamedTuple):
    """kv_heads, dim: K and d; theta: of the rotations; eps: of the norms."""

    heads: int
    kv_heads: int
    dim: int
    theta: float
    eps: float


class Level(NamedTuple):
    """One level of the prefix tree: offsets [N + 1], codes [C], tokens [V] of the codes, their output rows [V, D], and
    the most children of a node."""

    offsets: Tensor
    codes: Tensor
    tokens: Tensor
    rows: Tensor
    degree: int


class Search:
    """Beam search over a catalog, with scores normalized over the legal continuations.

    layers: by name, matrices as [out, in]: qkv, o, gate_up, down, and the norms' scales. Where the weights are on a
    CPU, nothing is captured. compiled: layers by torch.compile.
    """

    def __init__(
        self,
        shape: Shape,
        embed: Tensor,
        layers: Sequence[Mapping[str, Tensor]],
        norm: Tensor,
        levels: Sequence[Level],
        width: int,
        compiled: bool = False,
    ) -> None:
        self._shape, self._embed, self._layers, self._norm_scale = shape, embed, layers, norm
        self._levels, self._width, self._device = levels, width, embed.device
        half = shape.dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=self._device)
        self._frequencies = shape.theta ** (-steps / half)
        self._in_prompt, self._in_step = self._prompt_layer, self._beam_layer
        if compiled:
            torch._dynamo.config.recompile_limit = SHAPES
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self._in_prompt, self._in_step = (
                torch.compile(each, dynamic=False) for each in (self._prompt_layer, self._beam_layer)
            )

    def prepare(self, tokens: int, batch: int) -> Any:
        """A function from prompts [B, T] to leaves and scores [B, W], as arrays."""
        given = torch.zeros((batch, tokens), dtype=torch.long, device=self._device)
        replay = self._captured(given) if self._device.type == "cuda" else lambda: self._search(given)

        def run(prompts: Int32) -> tuple[Any, Any]:
            given.copy_(torch.from_numpy(prompts).long())
            leaves, scores = replay()
            return leaves.cpu().numpy(), scores.cpu().numpy()

        return run

    def _captured(self, given: Tensor) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose and allocate before the capture
                self._search(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self._search(given)

        def replay() -> Found:
            graph.replay()
            return found

        return replay

    def _search(self, prompts: Tensor) -> Found:
        with torch.inference_mode():
            return self._in_inference(prompts)

    def _in_inference(self, prompts: Tensor) -> Found:
        hidden, shared = self._prefill(prompts)
        batch, count = prompts.shape
        scores = torch.zeros((batch, 1), device=self._device)
        nodes = torch.zeros((batch, 1), dtype=torch.long, device=self._device)
        own: list[tuple[Tensor, Tensor]] = []
        chosen = nodes
        for number, level in enumerate(self._levels):
            if number:
                hidden = self._decode(chosen, count + number - 1, shared, own)
            parents, scores, chosen, nodes = self._step(level, hidden, scores, nodes)
            if 0 < number < len(self._levels) - 1:
                at = parents[:, None, None, :, None]
                own = [tuple(torch.take_along_dim(x, at, dim=3) for x in kv) for kv in own]
        return nodes, scores

    def _step(self, level: Level, hidden: Tensor, scores: Tensor, nodes: Tensor) -> tuple[Tensor, ...]:
        """Of each new beam: parent, score, token, node, [B, W]."""
        slots = torch.arange(level.degree, device=self._device)
        first, end = level.offsets[nodes], level.offsets[nodes + 1]
        children = first[..., None] + slots
        own = children < end[..., None]
        codes = level.codes[children.clamp(max=len(level.codes) - 1)]
        legal = functional.linear(hidden, level.rows).float().gather(-1, codes).masked_fill(~own, -torch.inf)
        totals = (scores[..., None] + torch.log_softmax(legal, -1)).flatten(1)
        best, flat = totals.topk(self._width, dim=1)
        parents = flat // level.degree
        return (
            parents,
            best,
            level.tokens[codes.flatten(1).gather(1, flat)],
            children.flatten(1).gather(1, flat),
        )

    def _prefill(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The last tokens' hidden states [B, 1, D], and for each layer keys and values [B, K, T, d]."""
        turn = self._turn(torch.arange(tokens.shape[1], device=self._device))
        h, shared = self._embed[tokens], []
        for layer in self._layers:
            h, k, v = self._in_prompt(layer, h, turn, layer is self._layers[-1])
            shared.append((k, v))
        return self._norm(h, self._norm_scale), shared

    def _prompt_layer(
        self, layer: Mapping[str, Tensor], h: Tensor, turn: tuple[Tensor, Tensor], is_last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, T, D] after a layer, and its keys and values. Of the last layer only the last place is read."""
        q, k, v = (x.transpose(1, 2) for x in self._heads(layer, h, turn))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self._shape.heads != self._shape.kv_heads
        )
        if is_last:
            h, out = h[:, -1:], out[:, :, -1:]
        return self._close(layer, h, out.transpose(1, 2)), k.contiguous(), v.contiguous()

    def _decode(
        self,
        tokens: Tensor,
        position: int,
        shared: list[tuple[Tensor, Tensor]],
        own: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Decode a token a beam [B, W]: hidden [B, W, D]. Adds to `own`, for each layer k and v [B, K, S, W, d]."""
        turn = self._turn(torch.full((tokens.shape[1],), position, device=self._device))
        h = self._embed[tokens]
        for i, (layer, of_prompt) in enumerate(zip(self._layers, shared, strict=True)):
            h, kept = self._in_step(layer, h, turn, of_prompt, own[i] if i < len(own) else None)
            own[i : i + 1] = [kept]
        return self._norm(h, self._norm_scale)

    def _beam_layer(
        self,
        layer: Mapping[str, Tensor],
        h: Tensor,
        turn: tuple[Tensor, Tensor],
        of_prompt: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h [B, W, D] after a layer, and the beams' own keys and values with this step's."""
        (batch, width), (shared_k, shared_v) = h.shape[:2], of_prompt
        kv_heads, groups = self._shape.kv_heads, self._shape.heads // self._shape.kv_heads
        q, k, v = self._heads(layer, h, turn)
        own_k, own_v = (x.transpose(1, 2)[:, :, None] for x in (k, v))
        if own is not None:
            own_k, own_v = torch.cat((own[0], own_k), dim=2), torch.cat((own[1], own_v), dim=2)
        q = q.reshape(batch, width, kv_heads, groups, -1).permute(0, 2, 3, 1, 4) * self._shape.dim**-0.5
        to_prompt = (q.flatten(2, 3) @ shared_k.transpose(2, 3)).unflatten(2, (groups, width))
        to_own = torch.einsum("bkgwd,bkswd->bkgws", q, own_k)
        weights = torch.softmax(torch.cat((to_prompt, to_own), dim=-1), dim=-1)
        n = shared_k.shape[2]
        out = (weights[..., :n].flatten(2, 3) @ shared_v).unflatten(2, (groups, width))
        out = out + torch.einsum("bkgws,bkswd->bkgwd", weights[..., n:], own_v)
        return self._close(layer, h, out.permute(0, 3, 1, 2, 4)), (own_k, own_v)

    def _heads(self, layer: Mapping[str, Tensor], h: Tensor, turn: tuple[Tensor, Tensor]) -> list[Tensor]:
        """q [..., H, d], k and v [..., K, d] of h [..., D]; q and k are normed and turned."""
        heads, kv_heads, dim = self._shape[:3]
        x = functional.linear(self._norm(h, layer["attention_norm"]), layer["qkv"])
        q, k, v = x.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=-2)
        return [
            _turned(self._norm(q, layer["q_norm"]), turn),
            _turned(self._norm(k, layer["k_norm"]), turn),
            v,
        ]

    def _close(self, layer: Mapping[str, Tensor], h: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and feed-forward block, each added to h [..., D]."""
        h = h + functional.linear(attended.reshape(*h.shape[:-1], -1), layer["o"])
        gate, up = functional.linear(self._norm(h, layer["mlp_norm"]), layer["gate_up"]).chunk(2, dim=-1)
        return h + functional.linear(functional.silu(gate) * up, layer["down"])

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return functional.rms_norm(x, scale.shape, scale, self._shape.eps)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, None] * self._frequencies
        return angles.cos(), angles.sin()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
