# SPDX-License-Identifier: Apache-2.0
"""`transformers`: generate with num_beams, free or constrained by prefix_allowed_tokens_fn; one forward for prefill.

The constraint is a dict from the generated prefix to its legal tokens; the scores are those before the mask, over the
whole vocabulary. length_penalty=0: a score is the sum of its tokens' log-likelihoods.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peers.lines import Message, serve, timed


class Generator:
    def __init__(self, folder: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        sequences = np.load(f"{folder}/catalog.npz")["sequences"]
        self._depth = sequences.shape[1]
        legal: dict[tuple[int, ...], set[int]] = {}
        for path in map(tuple, sequences.tolist()):
            for level in range(self._depth):
                legal.setdefault(path[:level], set()).add(path[level])
        self._legal = {prefix: sorted(tokens) for prefix, tokens in legal.items()}

    def answer(self, request: Message) -> Message:
        ids = torch.tensor(request["prompts"])
        run = functools.partial(
            self._beams if request["op"] == "beams" else self._first, ids, request.get("width", 1),
            request.get("mode", ""),
        )  # fmt: skip
        with torch.inference_mode():
            ms, reply = timed(run, request["at_least_s"])
        return {"ms": ms, **reply}

    def _first(self, ids: Any, width: int, mode: str) -> Message:
        out = self._model(ids, logits_to_keep=1, use_cache=True)
        return {"tokens": out.logits[:, -1].argmax(-1).tolist()}

    def _beams(self, ids: Any, width: int, mode: str) -> Message:
        length = ids.shape[1]
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            prefix_allowed_tokens_fn=functools.partial(self._allowed, length) if mode == "full" else None,
            max_new_tokens=self._depth,
            num_beams=width,
            num_return_sequences=width,
            length_penalty=0.0,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return {"sequences": out.sequences[:, length:].tolist(), "scores": out.sequences_scores.tolist()}

    def _allowed(self, length: int, batch: int, ids: Any) -> list[int]:
        return self._legal[tuple(ids[length:].tolist())]


if __name__ == "__main__":
    serve(lambda folder: Generator(folder).answer, ("torch", "transformers"))
