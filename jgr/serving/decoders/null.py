# SPDX-License-Identifier: Apache-2.0
"""A server without a model: what is left is what serving itself costs.

`NullExecutor` gives answers that can be worked out by hand: a recommendation starts at the leaf numbered by
the sum of the prompt's tokens and goes on upwards, a candidate's score is minus its leaf. Benchmarks measure
the server's own time with it, tests check what the server does around a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jgr.catalog.catalog import Catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import Config
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.decoders.serve import ServedDecoder, decoder_engine
from jgr.serving.decoders.work import (
    Outcome,
    RankOutcome,
    RankWork,
    RecommendOutcome,
    RecommendWork,
    SegmentsWork,
    Work,
)
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import Engine
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Profile, Start


class NullExecutor:
    """An executor over a catalog of `n_leaves` semantic ids that computes nothing."""

    lanes = 1

    def __init__(self, profiles: tuple[Profile, ...], n_leaves: int, in_flight: int = 1) -> None:
        self.profiles, self.in_flight = profiles, in_flight
        self.costs: Mapping[Profile, float] = {}
        self._n_leaves = n_leaves

    def warm_up(self, progress: Progress) -> None:
        for done, profile in enumerate(self.profiles, 1):
            progress(done, len(self.profiles), f"{profile.kind} {profile.batch}x{profile.tokens}")

    def bind(self) -> None:
        """See jgr.serving.engine.contract.Executors."""

    def launch(self, start: Start, work: Sequence[Work]) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        assert isinstance(start.shape, Profile)
        return self.run(start.shape, work)

    def collect(self, start: Start, pending: list[Outcome]) -> list[Outcome]:
        """See jgr.serving.engine.contract.Executors."""
        return pending

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        return [
            self._rank(work) if isinstance(work, RankWork) else self._recommend(work)
            for work in works
            if not isinstance(work, SegmentsWork)
        ]

    def _recommend(self, work: RecommendWork) -> RecommendOutcome:
        """Beam j holds leaf (sum of the prompt + j) mod n_leaves, score -j; filtered leaves are skipped."""
        start = int(work.prompt.sum()) % self._n_leaves
        count = min(work.beam_width, self._n_leaves) if work.filter.is_empty else self._n_leaves
        leaves = (start + np.arange(count, dtype=np.int32)) % self._n_leaves
        if not work.filter.is_empty:
            leaves = leaves[work.filter.enters(leaves)]
        leaves = leaves[: work.beam_width].astype(np.int32)
        return RecommendOutcome(leaves, -np.arange(len(leaves), dtype=np.float32))

    def _rank(self, work: RankWork) -> RankOutcome:
        return RankOutcome(-work.leaves.astype(np.float32))


def null_catalog(n_items: int) -> Catalog:
    """Items "0", "1", ... with titles; the semantic id of item i is i in base 256, so its leaf is i."""
    levels = [(f"<a_{i >> 16}>", f"<b_{i >> 8 & 255}>", f"<c_{i & 255}>") for i in range(n_items)]
    titles = [{"title": f"item {i}"} for i in range(n_items)]
    return Catalog.build([str(i) for i in range(n_items)], levels, titles)


def null_engine(config: Config, n_items: int = 10_000) -> Engine[ServedDecoder]:
    """An engine over `null_catalog(n_items)`: real prompts, batches and threads, but no model."""
    catalog = null_catalog(n_items)
    tree = PrefixTree.build(catalog.codes)
    prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(catalog), catalog)
    executor = NullExecutor(make_profiles(config.profiles), tree.n_leaves, config.batching.in_flight)
    return decoder_engine(config.model.name, catalog, tree, prompts, executor, config)
