# SPDX-License-Identifier: Apache-2.0
"""`vllm`: LLM.beam_search as it comes, and a search over the catalog by a loop of ours.

The prefix cache is emptied before every call, so that each pays for its prompt; the beams share it through that cache.
vLLM's own beam search under a grammar returns none of the beams: it keeps of each beam's 2 x width best tokens over the
whole vocabulary those that the grammar allows. So a constrained step asks for one token of each beam, with the children
in the tree as its allowed tokens; the log-probabilities after that mask are normalized over them (normalize="valid"),
and the best `width` of each beam are all that can matter, so the search is exact.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import numpy as np

from benchmarks.peers.lines import Message, serve, timed
from benchmarks.peers.trie import Beam, Trie

MAX_WIDTH, MAX_TOKENS, KV_CACHE_GIB = 512, 1100, 4


class Searcher:
    def __init__(self, folder: str) -> None:
        vllm = importlib.import_module("vllm")
        self._params = importlib.import_module("vllm.sampling_params")
        self._llm = vllm.LLM(
            model=folder,
            dtype="float32",
            max_model_len=MAX_TOKENS,
            max_logprobs=2 * MAX_WIDTH,
            logprobs_mode="processed_logprobs",
            max_num_seqs=MAX_WIDTH,
            disable_log_stats=True,
        )
        self._trie = Trie(np.load(f"{folder}/catalog.npz"))

    def answer(self, request: Message) -> Message:
        (prompt,) = request["prompts"]
        search = self._beams if request["mode"] == "unconstrained" else self._legal
        run = functools.partial(search, prompt, request["width"])
        ms, beams = timed(run, request["at_least_s"], before=self._llm.reset_prefix_cache)
        return {
            "ms": ms,
            "sequences": [beam.tokens for beam in beams],
            "scores": [beam.score for beam in beams],
        }

    def _beams(self, prompt: list[int], width: int) -> list[Beam]:
        params = self._params.BeamSearchParams(beam_width=width, max_tokens=self._trie.depth, ignore_eos=True)
        (output,) = self._llm.beam_search([{"prompt_token_ids": prompt}], params)
        return [Beam(tuple(beam.tokens[len(prompt) :]), 0, beam.cum_logprob) for beam in output.sequences]

    def _legal(self, prompt: list[int], width: int) -> list[Beam]:
        beams = [Beam()]
        for _ in range(self._trie.depth):
            prompts: Any = [{"prompt_token_ids": [*prompt, *beam.tokens]} for beam in beams]
            params = [self._one_of(self._trie.children(beam), width) for beam in beams]
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            given = [output.outputs[0].logprobs for output in outputs]
            logprobs = [dict(zip(of.token_ids, of.logprobs, strict=True)) for of in given]
            beams = self._trie.step(beams, logprobs, width)
        return beams

    def _one_of(self, children: list[int], width: int) -> Any:
        return self._params.SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, flat_logprobs=True,
            allowed_token_ids=children, logprobs=min(width, len(children)),
        )  # fmt: skip


if __name__ == "__main__":
    # One process, which is faster than two on two cores.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    serve(lambda folder: Searcher(folder).answer, ("vllm-cpu", "torch", "transformers"))
