# SPDX-License-Identifier: Apache-2.0
"""`vllm`'s LLM.beam_search, as it comes: compiled model, prefix cache for the prompt that the beams share.

The prefix cache is emptied before every call, so that each pays for its prompt. A constraint is a list of choices, the
12,000 items as words. vLLM keeps of each beam's 2 x width best tokens over the whole vocabulary those that the grammar
allows, so it loses legal beams; of its grammar backends `guidance` is the fastest here, and ends after one token.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np

from benchmarks.peers.lines import Message, serve, timed

MAX_WIDTH, MAX_TOKENS, KV_CACHE_GIB = 256, 1100, 2


class Searcher:
    def __init__(self, folder: str) -> None:
        vllm = importlib.import_module("vllm")
        self._params = importlib.import_module("vllm.sampling_params")
        self._llm = vllm.LLM(
            model=folder,
            dtype="float32",
            max_model_len=MAX_TOKENS,
            max_logprobs=2 * MAX_WIDTH,
            max_num_seqs=MAX_WIDTH,
            disable_log_stats=True,
            structured_outputs_config={"backend": "guidance"},
        )
        sequences = np.load(f"{folder}/catalog.npz")["sequences"]
        self._depth = sequences.shape[1]
        self._items = ["".join(f"<w{token:05d}>" for token in path) for path in sequences.tolist()]

    def answer(self, request: Message) -> Message:
        (prompt,) = request["prompts"]
        constraint: Any = None
        if request["mode"] != "unconstrained":
            constraint = self._params.StructuredOutputsParams(choice=self._items)
        params = self._params.BeamSearchParams(
            beam_width=request["width"],
            max_tokens=self._depth,
            ignore_eos=True,
            structured_outputs=constraint,
        )
        run = functools.partial(self._llm.beam_search, [{"prompt_token_ids": prompt}], params)
        ms, (output,) = timed(run, request["at_least_s"], before=self._llm.reset_prefix_cache)
        whole = [beam for beam in output.sequences if len(beam.tokens) == len(prompt) + self._depth]
        return {
            "ms": ms,
            "sequences": [beam.tokens[len(prompt) :] for beam in whole],
            "scores": [beam.cum_logprob for beam in whole],
        }


if __name__ == "__main__":
    # One process, which is faster than two on two cores.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    serve(lambda folder: Searcher(folder).answer, ("vllm-cpu", "torch", "transformers"))
