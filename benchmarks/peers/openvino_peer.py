# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI: one output token with paged attention; compute and the KV cache in float32, or in bfloat16.

The model is converted on loading (optimum-intel). Its prefix cache is off, so that each call computes its prompt, and
the prompts of a batch go through in one step.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.peers.lines import Message, number_type, serve, timed

MAX_BATCH, KV_CACHE_GIB = 8, 1


class Pipeline:
    def __init__(self, folder: str) -> None:
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        converted = f"{folder}/openvino"
        if not os.path.isdir(converted):
            _convert(folder, converted)
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_batched_tokens = 1 << 15
        scheduler.max_num_seqs = MAX_BATCH
        precision = {"float32": "f32", "bfloat16": "bf16"}[number_type()]
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(converted, scheduler, "CPU", settings)

    def answer(self, request: Message) -> Message:
        prompts = [self._openvino.Tensor(np.array([prompt], np.int64)) for prompt in request["prompts"]]
        config = self._genai.GenerationConfig()
        config.max_new_tokens = 1
        config.ignore_eos = True
        config.set_eos_token_id(1)
        run: Any = functools.partial(self._pipeline.generate, prompts, [config] * len(prompts))
        ms, results = timed(run, request["at_least_s"])
        return {"ms": ms, "tokens": [result.m_generation_ids[0][0] for result in results]}


def _convert(folder: str, into: str) -> None:
    """In a process of its own, so that torch is not in the one that is timed."""
    code = (
        "import sys; from optimum.intel import OVModelForCausalLM; "
        "OVModelForCausalLM.from_pretrained("
        "sys.argv[1], export=True, compile=False, load_in_8bit=False).save_pretrained(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, folder, into], check=True)


if __name__ == "__main__":
    serve(lambda folder: Pipeline(folder).answer, ("openvino", "openvino-genai", "optimum-intel"))
