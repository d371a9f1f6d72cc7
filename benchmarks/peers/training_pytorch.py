# SPDX-License-Identifier: Apache-2.0
"""SASRec and HSTU trained as one would write it in PyTorch: eagerly, and by torch.compile.

The same step as jgr's: the same windows, cut to the same width; scores of all items at the positions that have a
target, and of no other; gradients clipped by their global norm; AdamW, in PyTorch's fused form. Attention is PyTorch's
own for SASRec; HSTU's weights have no softmax, so that its attention is two products. Batches lie in memory: nothing
is read or drawn while time runs.

Letters: B batch, T positions, D hidden, H heads, n items, R positions with a target.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.lines import Message, serve

Tensor = Any
EPS = 1e-6


class Sasrec(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Pre-norm SASRec. weights: jgr's names and layout."""

    def __init__(self, sizes: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden, self.heads, self.dropout = sizes["hidden"], sizes["heads"], sizes["train"]["dropout"]
        self.embed = nn.Parameter(weights.pop("embed"))
        self.position = nn.Parameter(weights.pop("position"))
        self.norm = _norm(weights.pop("norm"))
        self.layers = nn.ModuleList(
            SasrecLayer({name.split("/")[1]: value[at] for name, value in weights.items()}, self.heads)
            for at in range(sizes["layers"])
        )

    def forward(self, rows: Tensor) -> Tensor:
        """The query vectors [B, T, D] of rows [B, T], -1 on the right."""
        h = functional.embedding(rows.clamp(min=0), self.embed) * self.hidden**0.5
        h = functional.dropout(h + self.position[: rows.shape[1]], self.dropout, self.training)
        for layer in self.layers:
            h = layer(h, self.dropout)
        return self.norm(h)


class SasrecLayer(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = (_norm(weights[name]) for name in ("attention_norm", "mlp_norm"))
        # One product for q, k and v.
        self.qkv = nn.Parameter(
            torch.cat([weights[name] for name in ("wq", "wk", "wv")], dim=1).T.contiguous()
        )
        self.wo = nn.Parameter(weights["wo"].T.contiguous())
        self.w1, self.b1 = nn.Parameter(weights["w1"].T.contiguous()), nn.Parameter(weights["b1"])
        self.w2, self.b2 = nn.Parameter(weights["w2"].T.contiguous()), nn.Parameter(weights["b2"])

    def forward(self, h: Tensor, dropout: float) -> Tensor:
        q, k, v = functional.linear(self.attention_norm(h), self.qkv).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        # Padding is on the right, where no real position looks.
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + functional.dropout(functional.linear(out, self.wo), dropout, self.training)
        x = functional.relu(functional.linear(self.mlp_norm(h), self.w1, self.b1))
        return h + functional.dropout(functional.linear(x, self.w2, self.b2), dropout, self.training)


class Hstu(nn.Module):  # type: ignore[misc]  # torch has no types here
    """HSTU with a bias of positions. weights: jgr's names and layout."""

    def __init__(self, sizes: dict[str, Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden, self.dropout = sizes["hidden"], sizes["train"]["dropout"]
        self.embed = nn.Parameter(weights.pop("embed"))
        self.position = nn.Parameter(weights.pop("position"))
        self.layers = nn.ModuleList(
            HstuLayer({name.split("/")[1]: value[at] for name, value in weights.items()}, sizes)
            for at in range(sizes["layers"])
        )

    def forward(self, rows: Tensor) -> Tensor:
        """The query vectors [B, T, D], of length 1, of rows [B, T], -1 on the right."""
        h = functional.embedding(rows.clamp(min=0), self.embed) * self.hidden**0.5
        h = (h + self.position[: rows.shape[1]]) * (rows >= 0).unsqueeze(-1)
        h = functional.dropout(h, self.dropout, self.training)
        for layer in self.layers:
            h = layer(h, self.dropout)
        return functional.normalize(h, dim=-1, eps=EPS)


class HstuLayer(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, weights: dict[str, Tensor], sizes: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.length = sizes["heads"], sizes["length"]
        self.values, self.keys = self.heads * sizes["v_dim"], self.heads * sizes["qk_dim"]
        self.uvqk = nn.Parameter(weights["uvqk"].T.contiguous())
        self.out, self.out_bias = (
            nn.Parameter(weights["out"].T.contiguous()),
            nn.Parameter(weights["out_bias"][0]),
        )
        self.positions = nn.Parameter(weights["positions"][0])

    def forward(self, h: Tensor, dropout: float) -> Tensor:
        count = h.shape[1]
        x = functional.silu(functional.linear(functional.layer_norm(h, h.shape[-1:], eps=EPS), self.uvqk))
        u, v, q, k = x.split((self.values, self.values, self.keys, self.keys), dim=-1)
        v, q, k = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (v, q, k))
        places = torch.arange(count)
        bias = self.positions[self.length - 1 + places[None] - places[:, None]]
        seen = (places[None] <= places[:, None]) / self.length
        weights = functional.silu(q @ k.transpose(2, 3) + bias) * seen
        o = (weights @ v).transpose(1, 2).flatten(2)
        gated = functional.dropout(
            u * functional.layer_norm(o, o.shape[-1:], eps=EPS), dropout, self.training
        )
        return h + functional.linear(gated, self.out, self.out_bias)


def _norm(scale_bias: Tensor) -> nn.LayerNorm:
    """A norm of jgr's [2, D]: scale minus 1, and bias."""
    norm = nn.LayerNorm(scale_bias.shape[-1], eps=EPS)
    norm.weight.data.copy_(1 + scale_bias[0])
    norm.bias.data.copy_(scale_bias[1])
    return norm


def loss_of(
    hidden: Tensor, table: Tensor, at: Tensor, targets: Tensor, temperature: float, unit: bool
) -> Tensor:
    """The mean cross-entropy over all items, [].

    hidden: [B T, D] query vectors. table: [n, D]; unit: its rows are scaled to length 1. at: [R] rows of hidden.
    targets: [R] rows of the table.
    """
    table = functional.normalize(table, dim=-1, eps=EPS) if unit else table
    return functional.cross_entropy((hidden.index_select(0, at) / temperature) @ table.T, targets)


class Training:
    """One training from the weights in a folder. compiled: whether loss and gradients are."""

    def __init__(self, folder: Path, compiled: bool, dropout: float | None = None) -> None:
        sizes = json.loads((folder / "sizes.json").read_text())
        train = sizes["train"]
        if dropout is not None:
            train["dropout"] = dropout
        with np.load(folder / "weights.npz") as found:
            weights = {name: torch.from_numpy(found[name].copy()) for name in found.files}
        form: Any = {"sasrec": Sasrec, "hstu": Hstu}[train["model"]]
        self._model = form(sizes, weights).train()
        self._clip, self._temperature = train["clip_norm"], train["temperature"]
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), train["learning_rate"], betas=(0.9, train["adam_b2"]),
            weight_decay=train["weight_decay"], fused=True,
        )  # fmt: skip
        # Few widths, so that each has a program; many numbers of targets, which share one.
        self._encode: Callable[..., Tensor] = (
            torch.compile(self._model, dynamic=False) if compiled else self._model
        )
        self._loss: Callable[..., Tensor] = torch.compile(loss_of, dynamic=True) if compiled else loss_of
        self._unit = train["model"] == "hstu"
        with np.load(folder / "windows.npz") as found:
            self._batches = [
                self._batch(rows[:, :width])
                for rows, width in zip(found["rows"], found["widths"], strict=True)
            ]

    @staticmethod
    def _batch(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        """A step's rows [B, T], its positions with a target [R], of B T, and their targets [R]."""
        following = rows[:, 1:].reshape(-1)
        at = np.flatnonzero(following >= 0)
        inputs = np.ascontiguousarray(rows[:, :-1], np.int64)
        return (
            torch.from_numpy(inputs),
            torch.from_numpy(at),
            torch.from_numpy(following[at].astype(np.int64)),
        )

    def steps(self, first: int, count: int) -> list[float]:
        """Take so many steps, the first on the batch of that number: the loss before each."""
        losses = []
        for step in range(first, first + count):
            self._optimizer.zero_grad(set_to_none=True)
            rows, at, targets = self._batches[step]
            hidden = self._encode(rows).flatten(0, 1)
            loss = self._loss(hidden, self._model.embed, at, targets, self._temperature, self._unit)
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
            self._optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def warm(self) -> None:
        """Take a step of each width, so that nothing is compiled later."""
        seen = set()
        for at, (rows, _, _) in enumerate(self._batches):
            if rows.shape not in seen:
                seen.add(rows.shape)
                self.steps(at, 1)


class Trainings:
    """The answers of one folder: an eager and a compiled training."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._running: dict[bool, Training] = {}

    def answer(self, request: Message) -> Message:
        compiled = request["compiled"]
        if request["op"] == "losses":
            return {"losses": Training(self._folder, compiled, dropout=0.0).steps(0, request["count"])}
        if compiled not in self._running:
            self._running[compiled] = Training(self._folder, compiled)
            self._running[compiled].warm()
        start = time.perf_counter()
        losses = self._running[compiled].steps(request["first"], request["count"])
        return {"seconds": time.perf_counter() - start, "loss": losses[-1]}


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    torch.set_flush_denormal(True)  # as XLA does
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it goes on eagerly
    serve(lambda folder: Trainings(folder).answer, ("torch",))
