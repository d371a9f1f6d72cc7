# SPDX-License-Identifier: Apache-2.0
"""A server on `transformers`' model with its cache, and a constrained beam search of ours around it, in batches.

`generate` would compute the prompt once for every beam, and call back to Python for each of them; this loop computes it
once, repeats its cache for the beams (batch_repeat_interleave), and then moves the generated tokens' rows alone: the
prompt's are the same for all beams of a request. Of the output matrix the level's columns are multiplied.

Requests that wait are answered together, up to MAX_BATCH, where they have the same width and about the same length;
prompts are padded on the left.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from benchmarks.peers.http_server import listen
from benchmarks.peers.lines import Message, serve

MAX_BATCH = 4
MAX_LENGTH_RATIO = 1.5

Tensor = Any


class Asked(NamedTuple):
    prompt: list[int]
    width: int
    answer: Future[Message]


class Server:
    def __init__(self, folder: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model = model.model
        arrays = np.load(f"{folder}/catalog.npz")
        self._depth = arrays["sequences"].shape[1]
        levels = range(self._depth)
        self._offsets = [torch.from_numpy(arrays[f"offsets_{level}"]).long() for level in levels]
        self._codes = [torch.from_numpy(arrays[f"codes_{level}"]).long() for level in levels]
        self._tokens = [torch.from_numpy(arrays[f"tokens_{level}"]).long() for level in levels]
        self._degrees = [int(offsets.diff().max()) for offsets in self._offsets]
        self._columns = [model.lm_head.weight[tokens].detach().contiguous() for tokens in self._tokens]
        self._waiting: list[Asked] = []
        self._came = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()
        self._port = listen(self._submit)

    def answer(self, request: Message) -> Message:
        return {"port": self._port}

    def _submit(self, request: Message) -> Future[Message]:
        asked = Asked(request["prompt"], request["width"], Future())
        with self._came:
            self._waiting.append(asked)
            self._came.notify()
        return asked.answer

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                with torch.inference_mode():
                    found = self._search([asked.prompt for asked in batch], batch[0].width)
            except Exception as error:
                for asked in batch:
                    asked.answer.set_exception(error)
            else:
                for asked, answer in zip(batch, found, strict=True):
                    asked.answer.set_result(answer)

    def _next_batch(self) -> list[Asked]:
        """The request that has waited for the longest, and others that go with it."""
        with self._came:
            self._came.wait_for(lambda: self._waiting)
            first = self._waiting[0]
            batch = [asked for asked in self._waiting if _goes_with(first, asked)][:MAX_BATCH]
            taken = set(map(id, batch))
            self._waiting = [asked for asked in self._waiting if id(asked) not in taken]
        return batch

    def _search(self, prompts: list[list[int]], width: int) -> list[Message]:
        batch, longest = len(prompts), max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
        cache = transformers.DynamicCache()
        hidden = self._hidden(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache).reshape(batch, 1, -1)
        scores, nodes = torch.zeros(batch, 1), torch.zeros(batch, 1, dtype=torch.long)
        sequences = torch.zeros(batch, 1, 0, dtype=torch.long)
        for level in range(self._depth):
            parents, scores, tokens, nodes = self._step(level, hidden, scores, nodes, width)
            chosen = parents[..., None].expand(-1, -1, sequences.shape[2])
            sequences = torch.cat((sequences.gather(1, chosen), tokens[..., None]), dim=2)
            if level == self._depth - 1:
                break
            beams = parents.shape[1]
            if level == 0:
                cache.batch_repeat_interleave(beams)
                mask = mask.repeat_interleave(beams, 0)
            else:
                self._move(cache, level, parents)
            mask = torch.cat((mask, torch.ones(batch * beams, 1, dtype=torch.long)), dim=1)
            places = (lengths + level).repeat_interleave(beams)[:, None]
            hidden = self._hidden(tokens.reshape(-1, 1), mask, places, cache).reshape(batch, beams, -1)
        return [
            {"sequences": sequences[row][alive].tolist(), "scores": scores[row][alive].tolist()}
            for row, alive in enumerate(scores.isfinite())
        ]

    def _hidden(self, ids: Tensor, mask: Tensor, places: Tensor, cache: Any) -> Tensor:
        """The last tokens' hidden states [rows, D]."""
        out = self._model(
            input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        return out.last_hidden_state[:, -1]

    def _move(self, cache: Any, count: int, parents: Tensor) -> None:
        """Give each beam the rows of its parent's `count` generated tokens but the last level's, in every layer."""
        rows = (parents + parents.shape[1] * torch.arange(len(parents))[:, None]).reshape(-1)
        for layer in cache.layers:
            for of_layer in (layer.keys, layer.values):
                of_layer[:, :, -count:] = of_layer[:, :, -count:].index_select(0, rows)

    def _step(
        self, level: int, hidden: Tensor, scores: Tensor, nodes: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each new beam, [B, W] each: its parent, score, token and node."""
        slots = torch.arange(self._degrees[level])
        first, end = self._offsets[level][nodes], self._offsets[level][nodes + 1]
        children = first[..., None] + slots
        own = children < end[..., None]
        children = children.clamp(max=len(self._codes[level]) - 1)
        codes = self._codes[level][children]
        legal = (hidden @ self._columns[level].T).gather(2, codes).masked_fill(~own, -torch.inf)
        totals = (scores[..., None] + torch.log_softmax(legal, 2)).flatten(1)
        best, flat = totals.topk(min(width, totals.shape[1]))
        tokens = self._tokens[level][codes.flatten(1).gather(1, flat)]
        return flat // len(slots), best, tokens, children.flatten(1).gather(1, flat)


def _goes_with(first: Asked, other: Asked) -> bool:
    least, most = sorted((len(first.prompt), len(other.prompt)))
    return first.width == other.width and most <= MAX_LENGTH_RATIO * least


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(lambda folder: Server(folder).answer, ("torch", "transformers"))
