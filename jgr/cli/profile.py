# SPDX-License-Identifier: Apache-2.0
"""`jgr profile [FOLDER]`: shows where a generator's time goes, by stage and by operation, over real requests.

The requests are histories of the configured dataset, or the lines of --requests_file. The engine is that of `jgr
serve`, warmed up before the trace. The last line of stdout is the profile as one JSON document, on a terminal with
--json alone.

With --costs=FILE no requests are traced: programs of many shapes are timed, of a generator or of a scorer, and the
model that is fitted to them, which predicts others, is written to the file.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jgr.cli import console
from jgr.config import Config, UserError

if TYPE_CHECKING:
    from jgr.evaluation.profiling import Summary
    from jgr.serving.api import Request
    from jgr.serving.engine.cost_profile import Timed
    from jgr.serving.policies.costs import CostModel

HELP = "show where a generator's time goes, by stage and by operation"

BESIDE_SOURCE, LEAST_SOURCE = 76, 12
"""Characters of an operation's line before its source, and of a source that is worth being shown."""


def define_flags() -> None:
    flags.DEFINE_integer("requests", 100, "requests to trace", lower_bound=1, upper_bound=10_000)
    flags.DEFINE_string(
        "requests_file", None, "JSONL file with bodies of /v1/recommend or /v1/rank, instead of the dataset"
    )
    flags.DEFINE_integer("concurrency", 1, "requests in flight", lower_bound=1, upper_bound=1024)
    flags.DEFINE_integer("top", 20, "operations to show", lower_bound=1)
    flags.DEFINE_string("out", None, "folder to keep the raw trace in")
    console.define_json()
    flags.DEFINE_string(
        "costs", None, "JSON file for a model of what runs of any shape cost; traces no requests"
    )


def main(argv: Sequence[str]) -> int:
    config = console.load_folder(flags.FLAGS, argv)
    values = flags.FLAGS
    traced = ("requests", "requests_file", "concurrency", "top", "out")
    console.refuse_unused(not values.costs, traced, "a trace of requests, which --costs does not make")
    if values.costs:
        return _costs(config, Path(values.costs))
    _refuse_scorer(config)
    from jgr.evaluation import profiling
    from jgr.files import make_folder

    if values.out:
        make_folder(Path(values.out), UserError, "--out")
        if any(Path(values.out).iterdir()):
            raise UserError(f"--out: {values.out} is not empty; a trace goes into a folder of its own")
    requests = _requests(config, values.requests, values.requests_file)
    kept = nullcontext(values.out) if values.out else tempfile.TemporaryDirectory(prefix="jgr-profile-")
    with kept as folder:
        wall_s, programs = asyncio.run(_trace(config, requests, values.concurrency, Path(folder)))
        events = profiling.read_events(Path(folder))
    summary = profiling.summarize(events, list(map(profiling.read_program, programs)), wall_s * 1e9)
    print(table(summary, len(requests), values.top, console.terminal_width()))
    console.print_json(_report(summary, len(requests), values.concurrency, values.top))
    return 0


def _refuse_scorer(config: Config) -> None:
    """Raise UserError for a scorer, whose requests run in other programs than the ones traced here."""
    from jgr.serving.versions.loading import is_scorer

    if config.model.path and is_scorer(Path(config.model.path)):
        raise UserError(
            "jgr profile traces decoders; a scorer's times are in timing_ms of its answers and in /metrics, and "
            "--costs fits what its parts cost"
        )


def _costs(config: Config, path: Path) -> int:
    """Fit the costs of a model's programs, and write them to a file."""
    from jgr.files import writing
    from jgr.serving.engine import cost_profile
    from jgr.serving.versions.cost_trials import load_trials

    if not path.parent.is_dir():
        raise UserError(f"--costs: {path.parent} is no folder")
    family, compile_trials = load_trials(config)
    with console.progress_bar("compiling") as bar:
        trials = compile_trials(bar)
    with console.progress_bar("timing") as bar:
        timed = cost_profile.measure(trials, bar)
    model = cost_profile.fit(timed, family)
    with writing(path, UserError) as stream:
        stream.write(model.to_json())
    report = cost_profile.report(timed, model)
    print(_costs_table(timed, model, report["spread"]))
    console.print_json(report)
    return 0


def _costs_table(timed: Sequence[Timed], model: CostModel, spread: float) -> str:
    lines = [f"{'kind':<18}{'run':<44}{'ms':>9}{'spread':>8}{'fitted':>10}"]
    for one in timed:
        fitted = model.seconds(one.kind, one.cost._asdict())
        lines.append(
            f"{one.kind:<18}{one.label:<44}{one.seconds * 1e3:>9.3f}{one.spread:>8.0%}{fitted * 1e3:>10.3f}"
        )
    lines += [
        "",
        f"{'kind':<18}{'points':>7}{'MAPE':>8}{'held out':>10}{'its worst':>11}  {'host: run':<12}{'request'}",
    ]
    for kind, found in model.kinds.items():
        host, held = model.hosts[kind], found.held_out
        out = f"{'-':>10}{'-':>11}" if held is None else f"{held.mean:>10.1%}{held.largest:>11.1%}"
        lines.append(
            f"{kind:<18}{found.points:>7}{found.errors.mean:>8.1%}{out}  {host.constant * 1e3:.3f} ms"
            f"    {host.coefficients.get('requests', 0.0) * 1e3:.3f} ms"
        )
    lines += [
        "",
        f"a run's quartiles are {spread:.0%} apart (median of all runs): errors below that are noise",
    ]
    return "\n".join(lines)


def _requests(config: Config, count: int, path: str | None) -> list[Request]:
    """`count` requests; if the source has fewer, they start again from its first."""
    from msgspec.json import Decoder

    from jgr.serving.api import RankRequest, RecommendRequest
    from jgr.serving.errors import RequestError
    from jgr.serving.http.decoding import decode

    if path is None:
        from jgr.data.datasets import load_dataset
        from jgr.models.manifest import learnt_catalog

        dataset = load_dataset(config.data, learnt_catalog(config))
        ids, examples = dataset.catalog.item_ids, dataset.interactions.test
        if not len(examples):
            raise UserError("data: the dataset has no test examples to make requests of; use --requests_file")
        longest = config.server.max_history
        return [
            RecommendRequest(
                history=[ids[row] for row in examples.histories[i % len(examples)][-longest:]],
                top_k=min(10, config.beam.width, len(ids)),
            )
            for i in range(count)
        ]
    from jgr.files import read_lines

    found: list[Request] = []
    recommend, rank = Decoder(RecommendRequest), Decoder(RankRequest)
    for number, line in read_lines(Path(path), UserError):
        if len(found) == count:
            break
        try:
            found.append(decode(rank, line) if b'"candidates"' in line else decode(recommend, line))
        except RequestError as error:
            raise UserError(f"{path}:{number}: {error}") from None
    if not found:
        raise UserError(f"{path}: holds no request")
    return [found[i % len(found)] for i in range(count)]


async def _trace(
    config: Config, requests: Sequence[Request], concurrency: int, folder: Path
) -> tuple[float, list[str]]:
    """Answer the requests under the profiler. Returns wall seconds, and the texts of the compiled programs."""
    import jax

    from jgr.serving.api import RankRequest
    from jgr.serving.decoders.loading import load_engine
    from jgr.serving.decoders.paged_executor import DecoderExecutors
    from jgr.serving.errors import RequestError
    from jgr.serving.policies.jobs import KINDS

    asked = {"rank" if isinstance(request, RankRequest) else "recommend" for request in requests}
    engine = load_engine(config, kinds=[kind for kind in KINDS if kind in asked])
    executor = engine.served.executors
    assert isinstance(executor, DecoderExecutors)
    with console.progress_bar("compiling") as bar:
        await engine.start(bar)
    todo = iter(requests)

    async def ask(some: Iterable[Request]) -> None:
        for request in some:
            try:
                await engine.answer(request)
            except RequestError as error:
                raise UserError(f"a request was refused: {error}") from None

    try:
        await ask(requests[:1])
        jax.profiler.start_trace(folder)
        start = time.perf_counter()
        try:
            await asyncio.gather(*(ask(todo) for _ in range(concurrency)))
            wall_s = time.perf_counter() - start
        finally:
            jax.profiler.stop_trace()
    finally:
        await engine.drain(config.server.drain_timeout_s)
    return wall_s, executor.program_texts()


def table(summary: Summary, requests: int, top: int, width: int | None) -> str:
    """width: characters of a terminal's line, to which the sources of operations are cut, or left out; None: any."""
    total = sum(summary.stage_ns.values())

    def cells(ns: float) -> str:
        return f"{ns / 1e6 / requests:>10.3f}  {ns / total:>6.1%}"

    room = None if width is None else width - BESIDE_SOURCE

    def told(source: str) -> str:
        return f"  {source[:room]}" if source and (room is None or room >= LEAST_SOURCE) else ""

    window, busy = summary.window_ns, summary.busy_ns
    lines = [
        f"{requests} requests in {window / 1e9:.2f} s; the device was busy for {busy / window:.1%} of it",
        "",
        f"{'stage':<24}{'ms/request':>10}  {'share':>6}",
        *(f"{stage:<24}{cells(ns)}" for stage, ns in summary.stage_ns.items()),
        "",
        f"{'operation':<30}{'stage':<18}{'calls':>7}{'ms/request':>11}  {'share':>6}{told('source')}",
    ]
    for op in summary.operations[:top]:
        source = told("/".join(op.source.split("/")[-3:]))
        lines.append(f"{op.name[:29]:<30}{op.stage:<18}{op.calls:>7} {cells(op.total_ns)}{source}")
    return "\n".join(lines)


def _report(summary: Summary, requests: int, concurrency: int, top: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "concurrency": concurrency,
        "wall_ms": summary.window_ns / 1e6,
        "busy_ms": summary.busy_ns / 1e6,
        "stages_ms": {stage: ns / 1e6 for stage, ns in summary.stage_ns.items()},
        "operations": [
            {
                "name": op.name,
                "stage": op.stage,
                "source": op.source,
                "calls": op.calls,
                "ms": op.total_ns / 1e6,
            }
            for op in summary.operations[:top]
        ],
    }
