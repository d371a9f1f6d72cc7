# SPDX-License-Identifier: Apache-2.0
"""The first output token beside other engines as benchmarks/prefill_vs_peers.py compares it, of 51 M parameters.

JGR_PEERS_TORCH=PYTHON JGR_PEERS_OPENVINO=PYTHON python -m benchmarks.prefill_vs_peers_51m [--quick]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import harness, prefill_vs_peers
from benchmarks.beam_vs_peers import two_cores
from benchmarks.harness import Benchmark
from benchmarks.peers.workload import LARGER
from benchmarks.prefill_vs_peers import SOURCES

if __name__ == "__main__":
    two_cores()
    measure = partial(prefill_vs_peers.measure, model=LARGER, size="-51m")
    sources = (Path(__file__), *SOURCES)
    harness.main(
        Benchmark(
            "prefill_vs_peers_51m", measure, ("jax", "jaxlib", "numpy"), sources, plot=prefill_vs_peers.plot
        )
    )
