# SPDX-License-Identifier: Apache-2.0
"""Beam search beside other engines as benchmarks/beam_vs_peers.py compares it, with a model of 51 M parameters.

JGR_PEERS_TORCH=PYTHON JGR_PEERS_VLLM=PYTHON python -m benchmarks.beam_vs_peers_51m [--quick]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import beam_vs_peers, harness
from benchmarks.beam_vs_peers import SOURCES
from benchmarks.harness import Benchmark
from benchmarks.peers.workload import LARGER

if __name__ == "__main__":
    beam_vs_peers.two_cores()
    measure = partial(beam_vs_peers.measure, model=LARGER, size="-51m")
    sources = (Path(__file__), *SOURCES)
    harness.main(
        Benchmark("beam_vs_peers_51m", measure, ("jax", "jaxlib", "numpy"), sources, plot=beam_vs_peers.plot)
    )
