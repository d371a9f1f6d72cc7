# SPDX-License-Identifier: Apache-2.0
"""benchmarks/large_models.py with Qwen3-1.7B: 10 million items, with and without a filter; memory, and starts.

python -m benchmarks.large_models_1_7b [--quick]          16 GiB of memory, 20 minutes
"""

from __future__ import annotations

from benchmarks import large_models

if __name__ == "__main__":
    large_models.main("large_models_1_7b")
