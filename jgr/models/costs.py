# SPDX-License-Identifier: Apache-2.0
"""What work costs, counted in the terms that a fit gives seconds to (MODEL-30, SIM-10). Imports no jax.

Each family counts its own: `decoder_costs` and `lazy_decoder_costs` the works of `generator_costs`, `scorer_costs` the
parts of a scorer's request. `jgr.serving.policies.costs` makes seconds of counts.
"""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The counts of some work.

    products: FLOPs of products with weights. attention: FLOPs of products of queries with keys, and of what these give
    with values. bytes: of weights, keys and values that must move, weights once for each pass. choices: numbers that
    beam steps choose among. dispatches: layers and beam steps that run one after the other.

    A multiply-add counts as two FLOPs; norms, softmax, biases and gates are left out: they grow as what is counted.
    """

    products: int = 0
    attention: int = 0
    bytes: int = 0
    choices: int = 0
    dispatches: int = 0

    @property
    def flops(self) -> int:
        return self.products + self.attention

    def plus(self, other: Cost) -> Cost:
        """The cost of both works, one after the other."""
        return Cost(*(mine + its for mine, its in zip(self, other, strict=True)))
