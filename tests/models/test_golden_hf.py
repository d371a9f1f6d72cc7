# SPDX-License-Identifier: Apache-2.0
"""Parity with the arrays of tests/golden/hf: an independent implementation's forwards, caches and beam searches.

Every array of one family; of the others the forwards, in which alone they differ. All arrays of all families are those
of benchmarks/golden_parity.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tools.golden_parity import ATOL, FAMILIES, FILES, GOLDEN, INPUTS, comparisons


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array(family: str) -> None:
    files = FILES if family == "qwen3" else FILES[:1]
    compared: dict[str, set[str]] = {}
    for c in comparisons(family, files):
        compared.setdefault(c.file, set()).add(c.array)
        assert c.is_within(ATOL), f"{c.file}: {c.array} is off by {c.error:.2g}"
    for path in (GOLDEN / family / f"golden_{file}.npz" for file in files):
        wanted = {name for name in np.load(path).files if not INPUTS.fullmatch(name)}
        assert wanted <= compared[path.stem], wanted - compared[path.stem]
