# SPDX-License-Identifier: Apache-2.0
"""A server on vLLM's engine, whose beam search is a loop of ours over the catalog's tree.

vLLM's own beam search under a grammar loses legal beams. Here a beam step is a request for one token of each beam, with
the children in the tree as its allowed tokens; the log-probabilities after that mask are normalized over them, and the
best `width` of each beam are all that can matter, so the search is exact. All three levels are asked for.

The engine's own scheduler does the batching: the beams of all requests that are under way share its steps. The prompt
is computed once and its blocks shared through the prefix cache, which a salt keeps from being shared between requests.
"""

from __future__ import annotations

import importlib
import itertools
import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.peers.http_server import listen
from benchmarks.peers.lines import Message, serve
from benchmarks.peers.trie import Beam, Trie

MAX_TOKENS, MAX_CHILDREN, MAX_SEQUENCES, BLOCK, KV_CACHE_GIB = 2304, 256, 256, 32, 4


@dataclass(eq=False)
class Search:
    """A request under way. asked: the beams whose continuations were asked for; found: for each, once it is there."""

    prompt: list[int]
    width: int
    salt: str
    answer: Future[Message]
    asked: list[Beam] = field(default_factory=list)
    found: list[dict[int, float] | None] = field(default_factory=list)
    missing: int = 0


class Server:
    """One thread owns the engine: it takes what has come, and makes a step, for as long as there is work."""

    def __init__(self, folder: str) -> None:
        vllm = importlib.import_module("vllm")
        self._params: Any = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=folder,
            dtype="float32",
            max_model_len=MAX_TOKENS,
            max_logprobs=MAX_CHILDREN,
            logprobs_mode="processed_logprobs",
            max_num_seqs=MAX_SEQUENCES,
            block_size=BLOCK,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine
        self._trie = Trie(np.load(f"{folder}/catalog.npz"))
        self._names = itertools.count()
        self._of: dict[str, tuple[Search, int]] = {}
        self._came: queue.SimpleQueue[Search] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        self._port = listen(self._submit)

    def answer(self, request: Message) -> Message:
        return {"port": self._port}

    def _submit(self, request: Message) -> Future[Message]:
        answer: Future[Message] = Future()
        self._came.put(Search(request["prompt"], request["width"], str(next(self._names)), answer))
        return answer

    def _work(self) -> None:
        try:
            while True:
                while not self._of or not self._came.empty():
                    self._ask(self._came.get(), [Beam()])
                for output in self._engine.step():
                    if output.finished:
                        self._take(output)
        except BaseException:
            importlib.import_module("traceback").print_exc()
            os._exit(1)  # nobody would be answered any more

    def _ask(self, search: Search, beams: list[Beam]) -> None:
        search.asked, search.found, search.missing = beams, [None] * len(beams), len(beams)
        for at, beam in enumerate(beams):
            children = self._trie.children(beam)
            params = self._params(
                max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, flat_logprobs=True,
                allowed_token_ids=children, logprobs=min(search.width, len(children)),
            )  # fmt: skip
            name = str(next(self._names))
            prompt = {"prompt_token_ids": [*search.prompt, *beam.tokens], "cache_salt": search.salt}
            self._engine.add_request(name, prompt, params)
            self._of[name] = search, at

    def _take(self, output: Any) -> None:
        search, at = self._of.pop(output.request_id)
        given = output.outputs[0].logprobs
        search.found[at] = dict(zip(given.token_ids, given.logprobs, strict=True))
        search.missing -= 1
        if search.missing:
            return
        found = [of_beam for of_beam in search.found if of_beam is not None]
        best = self._trie.step(search.asked, found, search.width)
        if len(best[0].tokens) < self._trie.depth:
            self._ask(search, best)
        else:
            search.answer.set_result(
                {"sequences": [beam.tokens for beam in best], "scores": [beam.score for beam in best]}
            )


if __name__ == "__main__":
    # One process, which is faster than two on two cores.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    serve(lambda folder: Server(folder).answer, ("vllm-cpu", "torch", "transformers"))
