# SPDX-License-Identifier: Apache-2.0
"""The products in a program, counted from what JAX traced."""

from __future__ import annotations

import math
from typing import Any


def dot_flops(jaxpr: Any) -> int:
    """Of all products in a program, its loops' as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [
            getattr(p, "jaxpr", p) for p in eqn.params.values() if hasattr(getattr(p, "jaxpr", p), "eqns")
        ]
        total += times * sum(map(dot_flops, inner))
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
    return total
