# SPDX-License-Identifier: Apache-2.0
"""The floor's arithmetic, and that rows and claims say who was faster."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import prefill_vs_peers as bench
from benchmarks import work
from benchmarks.peers import workload
from benchmarks.peers.workload import MODEL
from benchmarks.prefill_vs_peers import Found
from jgr.models import decoder, params


def test_work_counts_every_multiplication_once() -> None:
    per_layer = 4 * 256 * 256 + 3 * 256 * 704  # q, k, v, o; gate, up, down
    assert work.weights(MODEL) == pytest.approx(4 * per_layer, rel=1e-3)  # and norms
    seen = 3 * sum(range(1, 513)) + 512  # of the last layer, by the last token alone
    scores = 4 * 2 * 2 * 64 * seen  # heads, two products, multiply and add
    unread = 2 * 511 * (2 * 256 * 256 + 3 * 256 * 704)  # q, o and the mlp of the others
    least = work.prefill(MODEL, 2, 512, 4)
    assert least.flops == pytest.approx(2 * (2 * 512 * work.weights(MODEL) - unread + scores))
    assert work.kv_bytes(MODEL, 512, 4) == 512 * 4 * 4 * 64 * 2 * 4
    step = work.decode(MODEL, 1, 8, 512, 2, 4)
    assert step.flops == pytest.approx(8 * (2 * work.weights(MODEL) + 4 * 4 * 4 * 64 * 514))
    assert step.bytes == 4 * work.weights(MODEL) + work.kv_bytes(MODEL, 512 + 8 * 2, 4)
    assert work.total(least, step).flops == least.flops + step.flops
    assert work.head(MODEL, 3, 10, 4) == (2 * 3 * 10 * 256, 4 * 10 * 256)


def test_a_row_takes_the_best_peer_and_the_faster_matmul() -> None:
    same, other = (1, 2), (1, 3)
    row = bench.make_row(
        512,
        2,
        {
            "jgr": [Found(30.0, same), Found(32.0, same), Found(31.0, same)],
            "jgr by xla": [Found(62.0, same)] * 3,
            "matmul jgr": [Found(100.0, ())],
            "matmul pytorch": [Found(2 * bench.MATMUL_ROWS**3 / 2e11 * 1e3, ())],  # 200 GFLOP/s
            "openvino": [Found(20.0, same)] * 3,
            "transformers": [Found(62.0, same), Found(62.0, other), Found(62.0, same)],
        },
    )
    assert (row["best_peer"], row["time_over_best_peer"]) == ("openvino", 1.55)
    assert row["time_over_xla"] == 0.5
    assert row["same_tokens"] == {"openvino": True, "transformers": False, "jgr by xla": True}
    assert row["matmul_gflops"] == 200.0
    share = row["gflop"] / 200.0 / 0.031
    assert row["share_of_matmul_rate"]["jgr"] == pytest.approx(share, rel=1e-2)
    assert row["interval"] == (1.5, 1.6)
    claims = bench.claims([row, {"peer": "pytorch", "missing": "set JGR_PEERS_TORCH"}])
    assert [(c.id, c.value, c.target, c.holds) for c in claims] == [
        ("prefill-peers-missing", 1, 0, False),
        ("first-tokens-that-differ-from-a-peer", 1, 0, False),
        ("prefill-time-over-best-peer-prompt-512-batch-2", 1.55, 1.0, False),
    ]


def test_a_prompt_between_two_profiles_is_padded_and_its_first_token_is_the_same() -> None:
    catalog = workload.make_catalog(np.random.default_rng(0))
    small = replace(MODEL, hidden=32, layers=1, heads=1, kv_heads=1, head_dim=32, mlp=32)
    drawn: decoder.DecoderParams = params.initialize(decoder.spec(small), jax.random.key(0))
    prompts = np.stack([workload.draw_prompt(catalog, 500, np.random.default_rng(i)) for i in range(2)])
    assert [workload.profile(n) for n in (1, 512, 513, 1024, 1025)] == [512, 512, 1024, 1024, 2048]
    padded = bench.Ours(small, drawn, prompts, by_kernels=False).first()
    exact, _ = bench.first_tokens(drawn, prompts, np.full(2, 500, np.int32), cfg=small, kernels="none")
    assert padded == tuple(np.asarray(exact).tolist())
