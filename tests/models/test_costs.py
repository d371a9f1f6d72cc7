# SPDX-License-Identifier: Apache-2.0
"""Counted costs against the products of the traced programs, against pairs counted one by one, and without jax."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgr.models import (
    decoder,
    decoder_costs,
    generator_costs,
    hstu_costs,
    lazy_decoder,
    lazy_decoder_costs,
    lru_rec,
    params,
    sasrec,
    scorer_costs,
    stu,
    stu_scorer,
)
from jgr.models.costs import Cost
from jgr.models.decoder import DecoderConfig
from jgr.models.generator_costs import BeamStep, Decode, Level, Prefill
from jgr.models.hstu import HstuConfig
from jgr.models.kv import BeamKV, ContextKV
from jgr.models.lazy_decoder import LazyConfig
from jgr.models.lru_rec import LruRecConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorer_costs import Work
from jgr.models.stu import StuConfig
from jgr.models.stu_scorer import StuScorerConfig
from jgr.ops.constrained_topk import TreeLevel, constrained_topk
from jgr.ops.segment_attention.visibility import Arguments, prepare, visible
from jgr.prompt.layouts import SINGLE_USER_MULTI_ITEM
from tests.models.products import dot_flops

ROOT = Path(__file__).resolve().parents[2]
DENSE = DecoderConfig("qwen3", 40, 24, 3, 4, 2, 8, 20, 1e4, 1e-6, tied=True, max_position=64)
LAZY = LazyConfig(
    12, (0, 4, 8), (4, 4, 4), 9, 24, 3, 4, 2, 8, 20, context_heads=2, context_layers=2, context_parts=2,
    experts=5, experts_active=2, expert_mlp=10, dense_layers=1,
)  # fmt: skip
B, T, W = 2, 6, 5
LENGTHS = jnp.full(B, T, jnp.int32)
TOKENS = jnp.zeros((B, T), jnp.int32)


def flops(call: Any, *arguments: Any) -> int:
    """Of the products of a call, which is traced alone: its arguments may be shapes."""
    return dot_flops(jax.make_jaxpr(call)(*arguments).jaxpr)


def weights(of: Any, cfg: Any) -> Any:
    return params.abstract(of.spec(cfg))


def test_a_prefills_products_are_those_of_the_program() -> None:
    drawn = weights(decoder, DENSE)
    read = jnp.full((B, 1), T - 1)
    found = flops(lambda p: decoder.prefill(p, DENSE, TOKENS, LENGTHS, read=read).hidden, drawn)
    work = generator_costs.prefill(B, T)
    assert work == Prefill(B * T, 0, B * sum(range(1, T + 1)), B, B * T)
    square = work._replace(pairs=B * T * T)  # a block of attention computes what it masks
    counted = decoder_costs.cost(DENSE, square)
    assert found == counted.flops
    assert counted.attention == 4 * 4 * 8 * (2 * B * T * T + B * T)


def test_a_prefill_reads_and_writes_its_keys_and_values() -> None:
    work = generator_costs.prefill(B, 4, cached=3)
    assert work.pairs == B * sum(3 + n for n in (1, 2, 3, 4)) and work.read_pairs == B * 7
    matrices = ("wq", "wk", "wv", "wo", "gate", "up", "down")
    layers = decoder.spec(DENSE).layers
    numbers = sum(math.prod(getattr(layers, name).shape) for name in matrices)
    kv = 3 * B * 7 * 2 * 2 * 8
    assert decoder_costs.cost(DENSE, work, itemsize=2).bytes == 2 * (numbers + kv)


@pytest.mark.parametrize("step", [0, 2])
def test_a_decoded_tokens_products_are_those_of_the_program(step: int) -> None:
    drawn = weights(decoder, DENSE)
    context = ContextKV(*[jnp.zeros((3, B, 2, T, 8))] * 2)
    beams = BeamKV(*[tuple(jnp.zeros((3, B, W, 2, 8)) for _ in range(step))] * 2)
    ancestors = jnp.zeros((B, step + 1, W), jnp.int32)
    tokens = jnp.zeros((B, W), jnp.int32)
    call = functools.partial(decoder.decode, cfg=DENSE, attention="reference")
    found = flops(
        lambda p: call(p, tokens=tokens, context=context, lengths=LENGTHS, beams=beams, ancestors=ancestors)[
            0
        ],
        drawn,
    )
    counted = decoder_costs.cost(DENSE, Decode(B, W, T, step))
    assert counted.products == 2 * B * W * sum(
        math.prod(getattr(decoder.spec(DENSE).layers, name).shape)
        for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")
    )
    assert counted.attention == 4 * 4 * 8 * 3 * B * W * (T + step + 1)
    assert found == pytest.approx(counted.flops, rel=1e-9)


def test_lazy_decoders_products_are_those_of_the_program() -> None:
    drawn = weights(lazy_decoder, LAZY)
    found = flops(lambda p: lazy_decoder.begin(p, LAZY, TOKENS, LENGTHS)[0], drawn)
    counted = lazy_decoder_costs.cost(LAZY, generator_costs.prefill(B, T))
    unused = 2 * 3 * B * 24 * 32  # traced, but nothing reads the start token's query: XLA leaves it out
    assert found == counted.flops + unused
    assert counted.attention == 4 * 32 * 3 * B * (T // 3)

    _, state = jax.eval_shape(lambda p: lazy_decoder.begin(p, LAZY, TOKENS, LENGTHS), drawn)
    tokens, ancestors = jnp.zeros((B, W), jnp.int32), jnp.zeros((B, 1, W), jnp.int32)
    found = flops(lambda p, s: lazy_decoder.advance(p, LAZY, tokens, s, ancestors)[0], drawn, state)
    counted = lazy_decoder_costs.cost(LAZY, Decode(B, W, T, 0))
    assert counted.attention == 4 * 32 * 3 * B * W * (T // 3 + 2)
    own = 4 * 32 * 3 * B * W  # a beam's own token is attended to without a product of matrices
    assert found == counted.flops - own
    with pytest.raises(ValueError, match="4 cached tokens"):
        lazy_decoder_costs.cost(LAZY, generator_costs.prefill(1, 3, cached=4))


def test_a_beam_steps_products_are_those_of_the_program() -> None:
    level = TreeLevel(
        jnp.array([0, 3, 5]), jnp.array([0, 1, 2, 0, 9]), jnp.array([7]), jnp.zeros((1, 1), jnp.uint32)
    )
    hidden, scores = jnp.zeros((B, W, 24)), jnp.zeros((B, W))
    nodes = jnp.zeros((B, W), jnp.int32)
    step = functools.partial(constrained_topk, level=level, width=W, implementation="xla")
    found = flops(lambda h, head: step(h, head, scores, nodes).scores, hidden, jnp.zeros((32, 24)))
    counted = generator_costs.beam_step(24, BeamStep(B, W, 32), 4)
    assert found == counted.flops and counted.choices == B * W * 32 and counted.bytes == 4 * 24 * 32
    few = generator_costs.beam_step(24, BeamStep(B, W, 32, children=7, normalizer=40), 2)
    assert few.products == 2 * 24 * (B * 7 + B * W * 40) and few.bytes == 2 * 24 * (B * 7 + 40)
    assert few.choices == B * 7 + B * W * 40


def test_a_search_has_a_step_for_each_level() -> None:
    levels = (Level(64, 1, 50, 50), Level(64, 50, 400, 30), Level(64, 400, 500, 2))
    works = generator_costs.search(3, 20, 100, levels, lambda width, columns: width * columns // 16)
    assert works == (
        BeamStep(3, 1, 64),
        Decode(3, 20, 100, 0),
        BeamStep(3, 20, 64),  # 400 children at most, more than the 80 that are gathered
        Decode(3, 20, 100, 1),
        BeamStep(3, 20, 64, children=40),
    )
    ranked = generator_costs.score(3, 7, 100, levels[:2], vocabulary=9)
    assert ranked == (BeamStep(3, 1, 64, 0, 9), Decode(3, 7, 100, 0), BeamStep(3, 7, 64, 0, 9))


EVENTS, M = 6, 5
SASREC = SasrecConfig(30, EVENTS, 24, 3, 4, 20, "")
LRUREC = LruRecConfig(30, EVENTS, 24, 3, 20, "")
HSTU = HstuConfig(30, EVENTS, 24, 3, 2, 6, 10, 17, "", bias="none", concat_ua=True)
STACK = StuConfig(24, 3, 2, 6, 10, 40, contextual=2)
STU = StuScorerConfig(
    STACK, 30, EVENTS, 8, 3, 4, (4, 5), 14, 16, 20, ("click", "like"), ""
)  # fmt: skip


@pytest.mark.parametrize(("of", "cfg"), [(sasrec, SASREC), (lru_rec, LRUREC)])
def test_retrievers_products_are_those_of_the_program(of: Any, cfg: Any) -> None:
    rows = jnp.zeros((1, EVENTS), jnp.int32)
    found = flops(lambda p: of.encode(p, cfg, rows), weights(of, cfg))
    cost = scorer_costs.sasrec if of is sasrec else scorer_costs.lru_rec
    counted = cost(cfg, Work(True, 0))
    masked = 4 * 3 * 24 * (EVENTS**2 - EVENTS * (EVENTS + 1) // 2) if of is sasrec else 0
    assert found == counted.flops + masked
    both, part = cost(cfg, Work(True, M)), cost(cfg, Work(False, M))
    assert part == Cost(2 * M * 24, 0, 4 * M * 24) and both == counted.plus(part)


def test_hstus_part_is_its_layers_and_a_row_for_each_candidate() -> None:
    layers = hstu_costs.cost(HSTU, hstu_costs.of_history(EVENTS))
    assert scorer_costs.hstu(HSTU, Work(True, M)) == layers.plus(Cost(2 * M * 24, 0, 4 * M * 24))


def test_the_stu_scorers_products_are_those_of_the_program() -> None:
    drawn = weights(stu_scorer, STU)
    events = stu_scorer.Events(*[jnp.zeros((1, EVENTS), jnp.int32)] * 3)
    context, now = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)
    # The layers apart: their attention computes what it masks.
    around = flops(lambda p: stu_scorer.prefill(p, events, context, now, cfg=STU).past.k, drawn)
    x = jnp.zeros((1, 2 + EVENTS, 24))
    ends = jnp.array([2 + EVENTS])
    tokens = stu.describe(STACK, ends, ends, 0, 2 + EVENTS)
    around -= flops(lambda p: stu.layers(p.layers, STACK, x, tokens, ends)[1].k, drawn)
    counted = scorer_costs.stu(STU, Work(True, 0))
    pairs = 2 * (2 + EVENTS) + sum(2 + n + 1 for n in range(EVENTS))
    layers = hstu_costs.cost(STACK, hstu_costs.Work(2 + EVENTS, 0, pairs))
    assert counted.flops == layers.flops + around

    user = jax.eval_shape(lambda p: stu_scorer.prefill(p, events, context, now, cfg=STU), drawn)
    rows = jnp.zeros((1, M), jnp.int32)
    around = flops(lambda p, u: stu_scorer.score(p, u, rows, cfg=STU, micro_batch=M), drawn, user)
    x = jnp.zeros((1, M, 24))
    tokens = stu.describe(STACK, ends, ends + M, ends, M)
    around -= flops(lambda p, u: stu.layers(p.layers, STACK, x, tokens, ends, u.past)[0], drawn, user)
    counted = scorer_costs.stu(STU, Work(False, M))
    layers = hstu_costs.cost(STACK, hstu_costs.Work(M, 2 + EVENTS, M * (2 + EVENTS + 1)))
    assert counted.flops == layers.flops + around
    assert scorer_costs.stu(STU, Work(True, M)) == scorer_costs.stu(STU, Work(True, 0)).plus(counted)


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize(("max_attention", "full_rows"), [(0, 0), (3, 0), (3, 2), (9, 0)])
def test_the_stus_pairs_are_those_that_are_seen(contextual: int, max_attention: int, full_rows: int) -> None:
    stack = dataclasses.replace(
        STACK, contextual=contextual, max_attention=max_attention, full_rows=full_rows
    )
    cfg = dataclasses.replace(STU, stack=stack, slots=(4, 5)[:contextual])
    rows = contextual + EVENTS
    ends = jnp.array([rows])
    tokens = stu.describe(stack, ends, ends + M, 0, rows + M)
    reach = stu.window(stack, tokens, ends)
    q = jnp.zeros((1, rows + M, 2, 6))
    k = q.transpose(0, 2, 1, 3)
    problem = prepare(Arguments(q, k, k, tokens, SINGLE_USER_MULTI_ITEM, window=reach))
    keys = jax.tree.map(lambda x: x[:, None], problem.sources[0].keys)
    seen = np.asarray(visible(jax.tree.map(lambda x: x[:, :, None], problem.queries), keys))[0]
    both = 2 * stack.layers * stack.heads * (stack.qk_dim + stack.v_dim)
    assert scorer_costs.stu(cfg, Work(True, 0)).attention == both * seen[:rows].sum()
    assert scorer_costs.stu(cfg, Work(False, M)).attention == both * seen[rows:].sum()


def test_xla_counts_as_many_flops() -> None:
    """XLA counts loops once, so a model of one layer; and elementwise operations too, so wide layers."""
    cfg = dataclasses.replace(SASREC, hidden=256, layers=1, mlp=512)
    drawn = params.abstract(sasrec.spec(cfg))
    rows = jax.ShapeDtypeStruct((1, EVENTS), jnp.int32)
    compiled = jax.jit(lambda p, r: sasrec.encode(p, cfg, r)).lower(drawn, rows).compile()
    analysis: Any = compiled.cost_analysis()
    assert analysis["flops"] == pytest.approx(scorer_costs.sasrec(cfg, Work(True, 0)).flops, rel=0.05)


MODULES = (
    "costs", "generator_costs", "decoder_costs", "lazy_decoder_costs", "scorer_costs", "hstu_costs", "climber_costs",
)  # fmt: skip


def test_costs_are_counted_without_jax() -> None:
    imports = "; ".join(f"import jgr.models.{name}" for name in MODULES)
    code = f"import sys; {imports}; import jgr.serving.policies.costs; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {f"jgr.models.{name}" for name in MODULES} < loaded
    assert loaded & {"jax", "jaxlib"} == set()
