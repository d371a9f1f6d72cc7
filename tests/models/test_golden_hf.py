# SPDX-License-Identifier: Apache-2.0
"""Parity with the arrays of tests/golden/hf: an independent implementation's forwards, caches and beam searches.

Every array of one family; of the others the forwards, in which alone they differ. All arrays of all families are those
of benchmarks/golden_parity.py.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tools.golden_parity import FAMILIES, FILES, GOLDEN, comparisons

ATOL = 1e-4  # what the golden set states for float32
# Arrays that are fed to the model, or that describe the others; all the rest must be reproduced.
INPUTS = re.compile(
    r"(input_ids|position_ids|segment_ids|attention_mask|_mask|items|item_ids|item_lengths|instr_ids|user_ids"
    r"|prompts|prompt_lengths|_width|min_decision_gap)$"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array(family: str) -> None:
    files = FILES if family == "qwen3" else FILES[:1]
    compared: dict[str, set[str]] = {}
    for c in comparisons(family, files):
        compared.setdefault(c.file, set()).add(c.array)
        exact = c.want.dtype.kind in "iub"
        assert c.error <= (0 if exact else ATOL), f"{c.file}: {c.array} is off by {c.error:.2g}"
    for path in (GOLDEN / family / f"golden_{file}.npz" for file in files):
        wanted = {name for name in np.load(path).files if not INPUTS.search(name)}
        assert wanted <= compared[path.stem], wanted - compared[path.stem]
