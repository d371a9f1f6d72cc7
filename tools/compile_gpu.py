# SPDX-License-Identifier: Apache-2.0
"""Compiles every GPU kernel and the engine's whole programs for an H200, on a machine without one.

    make compile-gpu          with the CUDA plugin of both jax lines

XLA's compiler needs only a description of the device. What passes here has gone through Triton, LLVM and ptxas for
sm_90a, fits into shared memory and spills no register; what it computes is checked elsewhere, in interpret mode. Cases
come from the ops' own lists (tag "compile"). One kernel is there in other dialects than Pallas' Triton one too
(tools/shared_stage); what its machine code is made of is printed. Two controls, one of tiles too large for shared
memory and one for the registers, must be refused: if the compiler takes them, the check checks nothing and fails.

A program must not copy what it only reads, such as a layer's weights out of a stack of layers: a copy of more than
10 MB in the compiled program is an error. The third control holds its layers in a stack, and must be refused for that.

Exit codes: 0 all compiled and all controls refused, 1 not so, 2 the plugin is missing.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from jgr.cache.memory import PAGE_BYTES
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import CacheConfig
from jgr.models import beam, climber, devices, packed, params, quantize, scorers, shapes
from jgr.models.decoder import DecoderConfig
from jgr.models.generators import GeneratorConfig, compiler_options, generator, with_layers_joined
from jgr.models.hstu import HstuConfig
from jgr.ops import split
from jgr.ops.beam_attention import cases as beam_cases
from jgr.ops.beam_attention import pallas_triton
from jgr.ops.beam_attention.arguments import Arguments as BeamArguments
from jgr.ops.beam_attention.config import Config
from jgr.ops.testing import OpCases, all_ops
from jgr.prompt.layouts import Tokens
from jgr.serving.decoders.caching import kv_cells
from tools import gpu_target, machine_code, shared_stage
from tools.compiled_text import large_copies, matrices_apart

POOL_TOKENS = 64_000

LAYERS = 2
"""Layers of the generators' programs, which have no loop over them: the last one, whose unread places are left out, and
another; one more is the same kernels once more, and costs the compiler as much again."""
LEVELS = 2
"""Levels of the catalog: the root's, and one below it; further ones are the second once more."""
STACKED = 4
"""Layers of the control that holds them in a stack; of two, jax 0.11 takes the loop apart, and copies nothing."""
SUMS = 5
"""Sums over devices in the shared program: two for each of its two layers, and one for rows of the table of tokens."""
FAIL_ON_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


class Program(NamedTuple):
    """Something to compile: a function of arrays, and their shapes. refused: a part of the error that must come.

    is_op: one op alone, which copies an argument that it is not allowed to overwrite; what runs it hands it over.
    """

    name: str
    case: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    refused: str = ""
    is_op: bool = False
    sums: int = 0
    """Sums over devices in a program that two devices share, whose arguments are Spreads; 0: one has it to itself."""
    apart: int = 0
    """Matrices in 8 bits that are read by something else than the kernel of their product."""
    kernel: str = ""
    """The kernel whose machine code is read: it must be there, spill nothing and multiply by warpgroups."""
    weights: Any = ()
    """Those of a generator, which say with which of XLA's options it is compiled."""


class Spread(NamedTuple):
    """The shape of an argument of a program that two devices share, and how it is divided."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


class Outcome(NamedTuple):
    """What came of compiling a program. temp_bytes: its scratch memory. copies: those above compiled_text.LARGE_COPY.

    error: empty where all is as it must be.
    """

    name: str
    case: str
    seconds: float
    temp_bytes: int
    copies: int
    kernels: str
    error: str


def lower(
    call: Callable[..., Any], arguments: Sequence[Any], place: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Trace and lower for an H200; needs no plugin. place: adds the sharding that compiling needs."""
    with use_abstract_mesh(gpu_target.ABSTRACT):
        traced = jax.jit(call).trace(*jax.tree.map(place, tuple(arguments)))
        return traced.lower(lowering_platforms=("cuda",))


def compiler() -> Callable[[Program], Any]:
    """Compiles a program for an H200. Raises RuntimeError where the plugin is missing."""
    one, two = (
        topologies.get_topology_desc(
            platform="cuda", target_config=gpu_target.H200, topology=f"1x1x{count}"
        ).devices
        for count in (1, 2)
    )
    sharding = SingleDeviceSharding(one[0])

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def compile_(program: Program) -> Any:
        if not program.sums:
            with use_abstract_mesh(gpu_target.ABSTRACT):
                options = compiler_options(program.weights)
            return lower(program.call, program.arguments, placed).compile(options or None)
        mesh = Mesh(np.array(two), (split.AXIS,), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            spread = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.spec)),
                program.arguments,
                is_leaf=lambda x: isinstance(x, Spread),
            )
            return jax.jit(program.call).lower(*spread).compile()

    return compile_


def kernels(ops: Sequence[OpCases]) -> Iterator[Program]:
    """The cases that the ops want compiled, as "auto" runs them on a GPU."""
    for op in ops:
        for case in op.tagged("compile"):
            shapes = op.shapes(case, jnp.dtype(case.shape.get("dtype", "bfloat16")))
            call = functools.partial(_by_name, op.call, tuple(shapes), op.options(case))
            yield Program(op.name, case.name, call, tuple(shapes.values()), is_op=True)


def _by_name(op: Callable[..., Any], names: Sequence[str], options: dict[str, Any], *arrays: Any) -> Any:
    return op(**dict(zip(names, arrays, strict=True)), **options)


def _beam_attention(names: Sequence[str], config: Config, *arrays: Any) -> jax.Array:
    return pallas_triton.run(BeamArguments(**dict(zip(names, arrays, strict=True))), config)


def controls() -> Iterator[Program]:
    """Tiles of the beam attention kernel that cannot be right, and a loop over a stack of layers."""
    case = next(case for case in beam_cases.OP.cases if case.name == "qwen3_0.6b_1k_w512")
    shapes = beam_cases.OP.shapes(case, jnp.bfloat16)
    for name, config, error in (
        ("shared_memory", Config(256, 256, warps=8, stages=4), "Shared memory size limit exceeded"),
        ("registers", Config(128, 128, warps=4, stages=2), "register spilling"),
    ):
        call = functools.partial(_beam_attention, tuple(shapes), config)
        yield Program("control", name, call, tuple(shapes.values()), error)
    stacked = _packed("qwen3-1.7b", tokens=1024, context=1024, candidates=64, layers=STACKED, apart=False)
    yield stacked._replace(name="control", case="copies", refused="above 10 MB")


def dialects() -> Iterator[Program]:
    """The kernel that most of a search's beam attention is, in each of three; jax 0.11 leaves no PTX of Pallas' own."""
    shapes, tiles = beam_cases.OP.shapes(shared_stage.CASE, jnp.bfloat16), shared_stage.Tiles()
    config = Config(tiles.rows, tiles.tokens, tiles.splits, warps=tiles.warps, stages=tiles.stages)
    call = functools.partial(_beam_attention, tuple(shapes), config)
    kernel = "beam_attention" if jax.__version_info__ < (0, 11) else ""
    yield Program("shared_stage", "pallas_triton", call, tuple(shapes.values()), is_op=True, kernel=kernel)
    for form in shared_stage.FORMS:
        arguments = shared_stage.arguments()
        yield Program("shared_stage", form.name, form.call, arguments, is_op=True, kernel=form.kernel)


def engine() -> Iterator[Program]:
    """Programs in bfloat16, without the weights; LAYERS layers, 20,000 items, LEVELS levels of 8192.

    One searches; for the other generators ranking compiles the same prompt, steps and kernels, without the sorts of a
    search, which depend on no model and are half of its compiling.
    """
    # A batch, whose prompts are not split, and a single request, whose prompt is.
    yield _rank("qwen3-0.6b", batch=1, tokens=1024, candidates=128)
    yield _recommend("qwen3-1.7b", batch=8, tokens=1024, width=256)
    yield _packed("qwen3-1.7b", tokens=2048, context=2048, candidates=256)
    yield _in_8_bits("qwen3-0.6b")
    yield _rank("onerec-v2-0.1b", batch=8, tokens=1536, candidates=256)
    yield _climber("base", climber.BASE, candidates=128)
    yield _climber("long", climber.LONG, candidates=512)
    yield _renewed_climber("long", climber.LONG)
    yield from _hstu(candidates=512, growth=16)


def _rank(name: str, *, batch: int, tokens: int, candidates: int) -> Program:
    cfg = _cfg(name)
    weights, tables = _model(cfg)
    call = functools.partial(beam.rank, cfg=cfg)
    arguments = (weights, tables, _ints(batch, tokens), _ints(batch), _ints(batch, candidates))
    return Program("rank", f"{name}_b{batch}_t{tokens}_c{candidates}", call, arguments, weights=weights)


def _recommend(name: str, *, batch: int, tokens: int, width: int) -> Program:
    """`recommend` with every kind of filter."""
    cfg = _cfg(name)
    weights, tables = _model(cfg)
    listed, flags = _ints(batch, LEVELS, 8192), jax.ShapeDtypeStruct((batch,), jnp.bool_)
    bits = tuple(jax.ShapeDtypeStruct((33, len(codes) // 32 + 2), jnp.uint32) for codes in tables.codes)
    filters = beam.Filters(listed, listed, _ints(batch, LEVELS), flags, _ints(batch), bits)
    call = functools.partial(beam.recommend, cfg=cfg, width=width)
    arguments = (weights, tables, _ints(batch, tokens), _ints(batch), _ints(batch), filters)
    return Program("recommend", f"{name}_b{batch}_t{tokens}_w{width}", call, arguments, weights=weights)


def _in_8_bits(name: str) -> Program:
    """Ranking over weights in 8 bits: every product is one kernel, which reads them, but those of the prompt's last
    layer that are for one place alone: output, gate and up together, and down."""
    cfg = _cfg(name)
    _, tables = _model(cfg)
    call = functools.partial(beam.rank, cfg=cfg)
    stacks = quantize.declared(generator(cfg).spec(cfg), "int8", jnp.bfloat16)
    weights = jax.eval_shape(with_layers_joined, stacks)
    arguments = (weights, tables, _ints(1, 1024), _ints(1), _ints(1, 256))
    return Program("rank", f"{name}_int8", call, arguments, apart=3, weights=weights)


def _climber(name: str, cfg: climber.ClimberConfig, *, candidates: int) -> Program:
    """A request of FLAME's, the user with it, by the fused ops."""
    places = _ints(1, cfg.max_items)
    weights = params.abstract(climber.spec(cfg), jnp.bfloat16)
    events: Any = (places, places, places, _ints(1), _ints(1))

    def call(weights: Any, events: Any, rows: Any) -> jax.Array:
        return climber.rank(weights, cfg, events, rows, {})

    return Program("climber", name, call, (weights, climber.Events(*events), _ints(1, candidates)))


def _renewed_climber(name: str, cfg: climber.ClimberConfig) -> Program:
    """A kept user who asks at another time: the last event of each group again."""
    places = _ints(1, cfg.max_items)
    weights = params.abstract(climber.spec(cfg), jnp.float32)
    given: Any = (places, places, places, _ints(1), _ints(1))
    events = climber.Events(*given)
    kept = jax.eval_shape(functools.partial(climber.read, cfg=cfg), weights, events=events)

    def call(weights: Any, k: Any, v: Any, events: Any) -> Any:
        return climber.renew(weights, cfg, k, v, events)

    return Program("climber", f"{name}_renewed", call, (weights, kept.k, kept.v, events))


def _hstu(*, candidates: int, growth: int) -> Iterator[Program]:
    """Candidates after a user of 1024 events with times, computed whole, and from what is kept of the user."""
    cfg = HstuConfig(
        n_items=20_000, max_items=1024, hidden=256, layers=8, heads=4, qk_dim=64, v_dim=64, length=1035,
        items="", bias="times",
    )  # fmt: skip
    model, growing = scorers.scorer(cfg), scorers.growing(cfg)
    weights = params.abstract(model.spec(cfg), jnp.float32)
    events = _ints(1, cfg.max_items)
    users: Any = (events, events, events, _ints(1), _ints(1, 0), _ints(1))
    users, rows = scorers.Users(*users), _ints(1, candidates)

    def scores(weights: Any, users: Any, kept: Any, rows: Any) -> tuple[jax.Array, Any]:
        state = growing.state(weights, cfg, kept, users)
        return model.score(weights, cfg, state, scorers.Candidates(rows, {})), kept

    def whole(weights: Any, users: Any, rows: Any) -> tuple[jax.Array, Any]:
        return scores(weights, users, growing.begin(weights, cfg, users), rows)

    def grown(weights: Any, users: Any, kept: Any, rows: Any) -> tuple[jax.Array, Any]:
        return scores(weights, users, growing.grow(weights, cfg, kept, users, growth), rows)

    _, kept = jax.eval_shape(whole, weights, users, rows)
    yield Program("hstu", f"whole_c{candidates}", whole, (weights, users, rows))
    yield Program("hstu", f"grown_by_{growth}", grown, (weights, users, kept, rows))


def _packed(
    name: str, *, tokens: int, context: int, candidates: int, layers: int = LAYERS, apart: bool = True
) -> Program:
    """`rank` with candidates in the prompt and a page pool of POOL_TOKENS tokens."""
    cfg = _cfg(name, layers)
    assert isinstance(cfg, DecoderConfig)
    weights = _weights(cfg, apart)
    kv = kv_cells(CacheConfig(), cfg, "bfloat16", 2, PAGE_BYTES)
    pages = POOL_TOKENS * kv.parts // kv.slots
    pool = jax.ShapeDtypeStruct((pages, PAGE_BYTES // 4), jnp.uint32)
    row = _row(tokens, context, kv.parts)
    asked = packed.Asked(*[_ints(candidates)] * 3)
    call = functools.partial(packed.rank, cfg=cfg, kv=kv)
    return Program(
        "packed_rank", f"{name}_t{tokens}_c{context}", call, (weights, pool, row, asked), weights=weights
    )


def shared() -> Iterator[Program]:
    """The ranking of `_packed` by two devices, each with half of the heads; what is kept has 8 bits."""
    cfg = _cfg("qwen3-0.6b")
    assert isinstance(cfg, DecoderConfig)
    mesh: Any = AbstractMesh((2,), (split.AXIS,))
    two = devices.Placement(devices.Devices(mesh))

    def spread(x: Any) -> Spread:
        axis = two.divided(x) if isinstance(x, params.Spec) else None
        dtype = jnp.bfloat16 if isinstance(x, params.Spec) else x.dtype
        return Spread(x.shape, dtype, split.EVERYWHERE if axis is None else split.along(axis))

    def layer(stack: params.Spec) -> params.Spec:
        return replace(stack, shape=stack.shape[1:], axes=stack.axes[1:])

    def is_spec(x: Any) -> bool:
        return isinstance(x, params.Spec)

    declared: Any = generator(cfg).spec(cfg)
    each = jax.tree.map(layer, declared.layers, is_leaf=is_spec)
    weights = jax.tree.map(spread, replace(declared, layers=(each, each)), is_leaf=is_spec)
    tokens, kv = 1024, kv_cells(CacheConfig(quantize="int8"), cfg, "bfloat16", 2, PAGE_BYTES, 2)
    pool = Spread((64, 2 * PAGE_BYTES // 4), jnp.uint32, split.along(1))
    row, asked = jax.tree.map(spread, (_row(tokens, tokens, kv.parts), packed.Asked(*[_ints(64)] * 3)))

    def call(*arguments: Any) -> Any:
        scores, new = packed.rank(*arguments, cfg=cfg, kv=kv)
        return split.everywhere(scores), split.divided(new, 2)

    yield Program("packed_rank", "on_two_devices", call, (weights, pool, row, asked), sums=SUMS)


def _cfg(name: str, layers: int = LAYERS) -> GeneratorConfig:
    """A generator of a published shape, with so many layers."""
    return replace(shapes.named(name), layers=layers)


def _model(cfg: GeneratorConfig) -> tuple[Any, beam.CatalogTables]:
    """Shapes of weights and catalog."""
    tree = PrefixTree.build(np.random.default_rng(0).integers(0, 8192, (20_000, LEVELS)).astype(np.int32))
    weights = _weights(cfg)
    tables = jax.eval_shape(
        lambda w: beam.catalog_tables(tree, shapes.level_tokens(cfg)[:LEVELS], w), weights
    )
    return weights, tables


def _weights(cfg: GeneratorConfig, apart: bool = True) -> Any:
    """The shapes of the weights, as `jgr serve` holds them on a GPU, or in stacks."""
    stacks = params.abstract(generator(cfg).spec(cfg), jnp.bfloat16)
    return jax.eval_shape(with_layers_joined, stacks) if apart else stacks


def _row(tokens: int, context: int, parts: int) -> packed.Row:
    described, cached = (Tokens(*[_ints(n)] * 5) for n in (tokens, context))
    return packed.Row(_ints(tokens), described, _ints(tokens), _ints(context, parts), cached)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attempt(
    program: Program, compile_: Callable[[Program], Any], dump: Path, registers_too: bool = False
) -> Outcome:
    """Compile, and say what came of it."""
    before, start = set(dump.rglob("*")), time.perf_counter()
    error, used, temp_bytes, copies = "", "", 0, list[str]()
    try:
        compiled = compile_(program)
        analysis = compiled.memory_analysis()
        temp_bytes = analysis.temp_size_in_bytes if analysis is not None else 0
        text = compiled.as_text() or ""
        copies = [] if program.is_op else large_copies(text)
        error = f"{len(copies)} copies above 10 MB: {', '.join(copies[:3])}" if copies else ""
        sums = len(re.findall(r" all-(?:reduce|gather|to-all)(?:-start)?\(", text))
        if sums != program.sums:
            error = f"{sums} sums over devices, there should be {program.sums}"
        apart = matrices_apart(text)
        if apart != program.apart:
            error = (
                f"{apart} matrices in 8 bits are read outside their products, there should be {program.apart}"
            )
        if program.kernel:
            code = machine_code.newest(dump, before, program.kernel)
            used, error = str(code), error or code.problem
    except Exception as e:  # Triton, LLVM, ptxas and XLA each raise their own
        error = " ".join(str(e).split()) or type(e).__name__
    seconds = time.perf_counter() - start
    if program.refused:
        found = "was compiled" if not error else error
        error = "" if program.refused in error else f"must be refused with '{program.refused}', but: {found}"
    if error or program.refused:
        used = ""
    elif not used:
        used = machine_code.pallas_kernels(set(dump.rglob("*")) - before, registers_too)
    return Outcome(program.name, program.case, seconds, temp_bytes, len(copies), used, error)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("program", "case", "s", "temp MB", "copies", "registers and shared memory")]
    rows += [
        (
            o.name,
            o.case,
            f"{o.seconds:.1f}",
            f"{o.temp_bytes / 1e6:.1f}",
            str(o.copies),
            (o.error and f"FAILED: {o.error}") or o.kernels,
        )
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join([*map(str.ljust, row[:5], widths), row[5]]).rstrip() for row in rows)


def main(argv: Sequence[str]) -> int:
    if flags.FLAGS.processes > 1:
        return _in_parts(argv[0], flags.FLAGS.processes)
    jax.config.update("jax_platforms", "cpu")
    wanted, (part, parts) = flags.FLAGS.only, map(int, flags.FLAGS.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{given} {FAIL_ON_SPILLS} --xla_dump_to={folder}"
        machine_code.dump_into(Path(folder))
        try:
            compile_ = compiler()
        except RuntimeError as e:
            print(f"compile_gpu: no CUDA plugin of jax {jax.__version__} is installed: {e}", file=sys.stderr)
            return 2
        programs = [*kernels(all_ops()), *controls(), *dialects(), *engine(), *shared()]
        chosen = [p for p in programs if wanted in f"{p.name} {p.case}"][part - 1 :: parts]
        outcomes = [attempt(p, compile_, Path(folder), flags.FLAGS.registers) for p in chosen]
    print(f"jax {jax.__version__}, for an H200\n{table(outcomes)}")
    failed = [o for o in outcomes if o.error]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} as they must be")
    return 1 if failed or not outcomes else 0


def _in_parts(script: str, parts: int) -> int:
    """Every so-manieth program in a process of its own; the worst exit code of them."""
    command = [sys.executable, script, f"--only={flags.FLAGS.only}", f"--registers={flags.FLAGS.registers}"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.getcwd()]),
    }
    started = [
        subprocess.Popen([*command, f"--part={part}/{parts}"], env=environment)
        for part in range(1, parts + 1)
    ]
    return max(one.wait() for one in started)


if __name__ == "__main__":
    flags.DEFINE_string("part", "1/1", "compile the first of two halves, as 1/2, and so on")
    flags.DEFINE_integer("processes", 1, "compile in so many processes at once", lower_bound=1)
    flags.DEFINE_boolean("registers", False, "count the kernels' registers too, for which ptxas runs twice")
    flags.DEFINE_string("only", "", "compile only programs whose 'name case' contains this")
    app.run(main)
