# SPDX-License-Identifier: Apache-2.0
"""What each rule of a fleet's router is worth with ML-1M's traffic, as benchmarks/fleet_routing.py tells of KuaiRand's.

JGR_DATA=FOLDER python -m benchmarks.fleet_routing_ml_1m [--quick]      FOLDER holds ml-1m
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks import fleet_routing, harness
from benchmarks.fleet_routing import Dataset
from benchmarks.harness import Benchmark

ML_1M = Dataset("ML-1M", "movielens-1m", "ml-1m", hours=24.0)
SOURCES = (Path(__file__), Path(fleet_routing.__file__))

if __name__ == "__main__":
    measure = partial(fleet_routing.measure, dataset=ML_1M, name="fleet-routing-ml-1m")
    harness.main(Benchmark("fleet_routing_ml_1m", measure, ("ray", "numpy"), SOURCES))
