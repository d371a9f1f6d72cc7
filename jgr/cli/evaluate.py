# SPDX-License-Identifier: Apache-2.0
"""`jgr evaluate [FOLDER]`: recommendation quality through the serving path, beside baselines that count: popularity,
item-kNN, a Markov chain, sequential rules and sequence-kNN.

FOLDER is a model folder, which names its dataset too; without one, --config names both. Without --url the model is
loaded into an engine of this process; with --url a running server is asked over HTTP. With --sweep it measures quality
and latency for several values of a field instead; with --feedback how well a scorer predicts what users did with their
impressions. Lines for people come first; the last line of stdout is the result as one JSON document, on a terminal with
--json alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import Config, UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from jgr.catalog.catalog import Catalog
    from jgr.data.datasets import Dataset
    from jgr.data.interactions import Examples
    from jgr.evaluation.served import Query, Served

    Int32 = npt.NDArray[np.int32]

HELP = "measure a model's recommendations on a dataset"
UNCONSTRAINED = "without the catalog"


@dataclass(frozen=True)
class Options:
    """The values of the flags, which describe them. ks: cut-offs, ascending. plot: the PNG file of a sweep."""

    url: str | None = None
    ca_file: str | None = None
    split: str = "test"
    limit: int | None = None
    ks: tuple[int, ...] = (5, 10)
    exclude_history: bool = False
    both_conventions: bool = False
    fuse_depth: int = 0
    resamples: int = 1000
    seed: int = 0
    unconstrained: bool = False
    sweep: str | None = None
    requests: int = 200
    plot: str | None = None
    baseline: tuple[str, ...] = ()
    rules_window: int = 5
    rules_decay: float = 1.0
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.sweep and self.unconstrained:
            raise UserError("--sweep and --unconstrained are two measurements: give one of them")
        if self.feedback and (self.sweep or self.unconstrained):
            raise UserError("--feedback is a measurement of its own: leave out --sweep and --unconstrained")
        if self.plot and not self.sweep:
            raise UserError("--plot draws the curve of a --sweep: add one, as in --sweep=beam.width=8,16,32")
        if (self.both_conventions or self.fuse_depth) and (self.sweep or self.feedback):
            raise UserError(
                "--both_conventions and --fuse_depth add to the table: leave out --sweep and --feedback"
            )
        if self.baseline and (self.sweep or self.feedback):
            raise UserError("--baseline adds to the table: leave out --sweep and --feedback")
        if self.exclude_history and self.feedback:
            raise UserError("--feedback ranks what was shown: leave out --exclude_history")
        if self.unconstrained and self.url:
            raise UserError("--unconstrained searches with the weights of model.path: leave out --url")


def define_flags() -> None:
    flags.DEFINE_string("url", None, "ask this running server instead of loading the model")
    console.define_ca_file()
    flags.DEFINE_enum("split", "test", ("valid", "test"), "which targets to predict")
    flags.DEFINE_integer("limit", None, "use only the first so many examples", lower_bound=1)
    flags.DEFINE_list("k", ["5", "10"], "cut-offs of the metrics")
    flags.DEFINE_bool("exclude_history", False, "never recommend an item of the history")
    flags.DEFINE_bool("both_conventions", False, "a second table with the other choice of --exclude_history")
    flags.DEFINE_integer(
        "fuse_depth",
        0,
        "also fuse the first so many items of the model and of sequential rules by reciprocal ranks; 0: no such row",
        lower_bound=0,
        upper_bound=1000,
    )
    flags.DEFINE_integer(
        "resamples", 1000, "bootstrap resamples; 0: no intervals", lower_bound=0, upper_bound=100_000
    )
    flags.DEFINE_integer("seed", 0, "seed of the bootstrap", lower_bound=0)
    flags.DEFINE_bool(
        "unconstrained", False, "also search without the catalog; count sequences that are no item"
    )
    flags.DEFINE_bool(
        "feedback", False, "measure AUC and log loss of a scorer's tasks on what users were shown"
    )
    flags.DEFINE_integer(
        "rules_window",
        5,
        "sequential rules: number of last items of a history that are read",
        lower_bound=1,
        upper_bound=1000,
    )
    flags.DEFINE_float(
        "rules_decay",
        1.0,
        "sequential rules: an item at distance d weighs d ** -rules_decay",
        lower_bound=0.0,
        upper_bound=100.0,
    )
    flags.DEFINE_string("sweep", None, "measure quality and latency for each value, as in beam.width=8,16,32")
    flags.DEFINE_integer(
        "requests", 200, "requests per value of a sweep, to time them", lower_bound=1, upper_bound=100_000
    )
    flags.DEFINE_string("plot", None, "PNG file for the curve of a sweep")
    console.define_json()
    flags.DEFINE_multi_string(
        "baseline", [], "folder of a SASRec, LRURec or HSTU by jgr train to compare with; may be repeated"
    )


def main(argv: Sequence[str]) -> int:
    config = console.load_folder(flags.FLAGS, argv)
    options = _options(flags.FLAGS)
    from jgr.data.datasets import load_dataset
    from jgr.models.manifest import check_dataset, learnt_catalog

    check_dataset(config)
    dataset = load_dataset(config.data, learnt_catalog(config))
    lines, report = evaluate(config, dataset, options)
    print("\n".join(lines))
    if options.plot:
        print(options.plot)
    console.print_json(or_null(report))
    return 0


def evaluate(config: Config, dataset: Dataset, options: Options) -> tuple[list[str], dict[str, Any]]:
    """The result as lines for people and as a JSON document. Raises UserError, which says what does not fit."""
    if options.split == "valid":
        from jgr.models.manifest import refuse_learnt_valid

        for name, folder in (
            ("--split", config.model.path),
            *(("--baseline", each) for each in options.baseline),
        ):
            refuse_learnt_valid(folder, name, "give --split=test")
    examples: Examples = getattr(dataset.interactions, options.split)
    if not len(examples):
        raise UserError(f"--split: the dataset has no {options.split} examples")
    examples = examples.select(slice(options.limit))
    what = _feedback if options.feedback else _sweep if options.sweep else _compare
    lines, found = what(config, dataset, examples, options)
    cut = {} if options.feedback else {"k": list(options.ks), "exclude_history": options.exclude_history}
    return lines, {
        "dataset": config.data.kind,
        "split": options.split,
        "examples": len(examples),
        **cut,
        "catalog_version": dataset.catalog.version,
        "through": options.url or "engine",
        "bootstrap": {"resamples": options.resamples, "seed": options.seed, "confidence": 0.95},
        **found,
    }


def or_null(found: Any) -> Any:
    """Replace NaN, which JSON does not have, by null in a result."""
    if isinstance(found, dict):
        return {name: or_null(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [or_null(value) for value in found]
    return None if isinstance(found, float) and math.isnan(found) else found


def _options(values: flags.FlagValues) -> Options:
    console.refuse_unused(bool(values.sweep), ("requests",), "--sweep")
    console.refuse_unused(not values.feedback, ("k",), "lists of items, which --feedback does not measure")
    rules = not (values.sweep or values.feedback)
    console.refuse_unused(rules, ("rules_window", "rules_decay"), "the table, without --sweep and --feedback")
    ks = values.k
    if not ks or not all(k.strip().isdecimal() and 1 <= int(k) <= 1000 for k in ks):
        raise UserError(f"--k must be integers from 1 to 1000, such as 1,5,10, not '{','.join(ks)}'")
    names = set(Options.__dataclass_fields__) - {"ks", "baseline"}
    return Options(
        ks=tuple(sorted({int(k) for k in ks})),
        baseline=tuple(dict.fromkeys(values.baseline)),
        **{name: getattr(values, name) for name in names},
    )


def _compare(
    config: Config, dataset: Dataset, examples: Examples, options: Options
) -> tuple[list[str], dict[str, Any]]:
    """Compare the model with the baselines: a table, and its values; with both conventions a second of each."""
    from jgr.evaluation.report import rank_trained
    from jgr.serving.versions.loading import is_scorer

    catalog = dataset.catalog
    if not options.url:  # bad options are refused before a model is loaded
        ranks_only = is_scorer(Path(config.model.path))
        if ranks_only and options.unconstrained:
            raise UserError(f"--unconstrained: {config.model.path} only ranks: it generates no sequences")
        if not ranks_only:
            _query(options, catalog, config.beam.width)
    chosen = [options]
    if options.both_conventions:
        chosen.append(replace(options, exclude_history=not options.exclude_history, unconstrained=False))
    # Before the model is served: a wrong baseline is told of at once, and what one took of the memory is free again.
    item_ids, top_k = catalog.item_ids, max(options.ks)
    trained = [
        rank_trained(options.baseline, item_ids, examples, each.exclude_history, top_k) for each in chosen
    ]
    if not options.url:
        _refuse_name(config.model.name, trained[0])
    total = len(examples) * len(chosen)
    with _serve(config, catalog, options) as served, _answers("evaluating", total) as on_answers:
        model, width = served.info.id, served.info.beam_width
        _refuse_name(model, trained[0])
        _check_lengths(examples, served.info.max_history, chosen)
        answers = [
            served.recommend_all(examples, _query(each, catalog, width), lambda: on_answers(1))
            for each in chosen
        ]
    tables = [
        _table(model, config, dataset, examples, each, ranked, others)
        for each, ranked, others in zip(chosen, answers, trained, strict=True)
    ]
    found = {"model": model, "beam_width": width, **tables[0][1]}
    if options.both_conventions:
        found["other_convention"] = {"exclude_history": chosen[1].exclude_history, **tables[1][1]}
    return [line for lines, _ in tables for line in [*lines, ""]][:-1], found


def _refuse_name(model: str, trained: Mapping[str, Int32]) -> None:
    """Raise UserError for a model whose row of the table would be that of a baseline, counted or trained."""
    from jgr.evaluation.report import BASELINES

    if model in (*BASELINES, *trained):
        raise UserError(f"model.name: '{model}' is the name of a baseline; choose another")


def _table(
    model: str,
    config: Config,
    dataset: Dataset,
    examples: Examples,
    options: Options,
    ranked: Int32,
    trained: Mapping[str, Int32],
) -> tuple[list[str], dict[str, Any]]:
    """The table of one convention, and its values. ranked: the rows of `model`, [n, largest k or fuse_depth].

    trained: the rows of each --baseline, by name.
    """
    from jgr.evaluation.fusion import reciprocal_rank_fusion
    from jgr.evaluation.report import RULES, compare, convention, format_comparison

    top_k = max(options.ks)
    rankings = {**_baselines(dataset, examples, options), **trained}
    fusion = f"{model} + {RULES}"
    rankings[model] = ranked[:, :top_k]
    found: dict[str, Any] = {"returned": int((rankings[model] >= 0).sum())}
    counts: list[str] = []
    if options.fuse_depth:
        parts = (ranked[:, : options.fuse_depth], rankings[RULES][:, : options.fuse_depth])
        rankings[fusion] = reciprocal_rank_fusion(parts, top_k)
    if options.unconstrained:
        rankings[f"{model} {UNCONSTRAINED}"], shares = _search(config, dataset, examples, options)
        found["invalid"] = shares
        counts = ["", *_shares(shares)]
    rankings = {name: rows[:, :top_k] for name, rows in rankings.items()}
    drawn = {"resamples": options.resamples, "seed": options.seed}
    compared = compare(rankings, examples, options.ks, model=model, **drawn)
    if options.fuse_depth:
        only = {name: rankings[name] for name in (model, RULES, fusion)}
        found["fusion"] = {
            "depth": options.fuse_depth,
            "differences": asdict(compare(only, examples, options.ks, model=fusion, **drawn))["differences"],
        }
    table = format_comparison(compared, options.ks, model, console.terminal_width())
    lines = [f"{convention(options.exclude_history)}:", table]
    return [*lines, *counts], {**found, **asdict(compared)}


def _baselines(dataset: Dataset, examples: Examples, options: Options) -> dict[str, Int32]:
    """The baselines' rankings by name: [n, largest k] rows, -1 after the last."""
    from jgr.evaluation.report import rank_baselines

    n_items, top_k = dataset.catalog.n_items, max(*options.ks, options.fuse_depth)
    return rank_baselines(
        dataset.interactions, examples, n_items, options.exclude_history, top_k,
        rules_window=options.rules_window, rules_decay=options.rules_decay,
    )  # fmt: skip


def _search(
    config: Config, dataset: Dataset, examples: Examples, options: Options
) -> tuple[Int32, dict[str, Any]]:
    """The ranking by search without the catalog, and the share of sequences that are no item, without and with it."""
    from jgr.evaluation.unconstrained import search_all

    with _answers("searching", len(examples)) as on_answers:
        found = search_all(
            config,
            dataset,
            examples,
            options.ks,
            exclude_history=options.exclude_history,
            on_answers=on_answers,
        )
    return found.ranked, {
        "unconstrained": found.unconstrained.to_json(),
        "constrained": found.constrained.to_json(),
    }


def _shares(shares: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    for name, counted in shares.items():
        of_k = ", ".join(
            f"{share:.2%} of the first {key[6:]}" for key, share in counted.items() if "@" in key
        )
        yield (
            f"no item of the catalog, {name}: {counted['invalid']:,} of {counted['sequences']:,} beams "
            f"({counted['share']:.2%}); {of_k}"
        )


def _sweep(
    config: Config, dataset: Dataset, examples: Examples, options: Options
) -> tuple[list[str], dict[str, Any]]:
    """Measure a sweep's curve: a point for each value."""
    from jgr.evaluation import sweep
    from jgr.evaluation.plots import plot_sweep
    from jgr.evaluation.report import compare, format_sweep

    swept = sweep.parse_sweep(str(options.sweep), config)
    if options.plot:
        extras.require("plot", "--plot")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise UserError(f"--plot: {Path(options.plot).absolute().parent} is not a folder")
    measured: dict[str, sweep.Measured] = {}
    in_flight = 0
    for chosen, widths in swept.engines:
        with _serve(chosen, dataset.catalog, options) as served:
            if not served.info.beam_width:
                raise UserError(f"--sweep: {served.info.id} only ranks: it has no beams and no curve")
            if options.url:
                sweep.check_remote(swept, served)
            in_flight = served.in_flight
            queries = {
                v: _query(options, dataset.catalog, width, partial=True) for v, width in widths.items()
            }
            with _answers("evaluating", len(queries) * len(examples)) as on_answers:
                measured |= sweep.measure(
                    served, examples, queries, requests=options.requests, on_answer=lambda: on_answers(1)
                )
    compared = compare(
        {value: point.ranked for value, point in measured.items()},
        examples,
        options.ks,
        resamples=options.resamples,
        seed=options.seed,
    )
    points = [
        {
            "value": value,
            "beam_width": point.beam_width,
            "metrics": compared.rows[value],
            "intervals": compared.intervals.get(value, {}),
            "latency_ms": point.latency_ms,
            "requests_per_s": round(point.requests_per_s, 2),
        }
        for value, point in measured.items()
    ]
    if options.plot:
        plot_sweep(swept.field, points, max(options.ks), Path(options.plot))
    found = {"sweep": swept.field, "requests": options.requests, "in_flight": in_flight, "points": points}
    return [format_sweep(swept.field, points, max(options.ks))], found


def _feedback(
    config: Config, dataset: Dataset, examples: Examples, options: Options
) -> tuple[list[str], dict[str, Any]]:
    """A scorer's quality for each task. model.path is needed with --url too, since its config says what to ask."""
    from jgr.data.impressions import requests
    from jgr.evaluation import feedback
    from jgr.models import scorers

    if not config.model.path:
        raise UserError("--feedback: set model.path, whose config says what the model reads")
    cfg = scorers.load_config(Path(config.model.path))
    needs = scorers.scorer(cfg).needs(cfg)
    found, model = requests(dataset.interactions, examples), config.model.name
    scores = feedback.baselines(dataset.interactions, found, needs.tasks)
    if model in scores:
        raise UserError(f"model.name: '{model}' is the name of a baseline; choose another")
    with (
        _serve(config, dataset.catalog, options) as served,
        _answers("evaluating", len(found)) as on_answers,
    ):
        scores[model] = feedback.ask(served, dataset.catalog, found, needs, lambda: on_answers(1))
    measured = feedback.measure(
        scores,
        dataset.interactions,
        found,
        needs.tasks,
        model,
        resamples=options.resamples,
        seed=options.seed,
    )
    counts = {
        "requests": len(found),
        "impressions": len(found.shown),
        "users": len(set(found.users.tolist())),
    }
    return feedback.lines(measured, model), {"model": model, **counts, **asdict(measured)}


def _check_lengths(examples: Examples, max_history: int, chosen: Sequence[Options]) -> None:
    """Raise UserError where a history is too long to be told whole, as it must be for its items to be left out."""
    longest = int((examples.histories.stops - examples.histories.starts).max(initial=0))
    if longest > max_history and any(options.exclude_history for options in chosen):
        raise UserError(
            f"--exclude_history, --both_conventions: a history has {longest} items, more than server.max_history "
            f"({max_history}): set it to {longest}"
        )


def _query(options: Options, catalog: Catalog, width: int, partial: bool = False) -> Query:
    """What the examples ask for. width: the beam width; 0 for a model that only ranks.

    partial: a beam narrower than the largest k is allowed; the items it does not return count as misses.
    """
    from jgr.evaluation.served import Query

    top_k = min(max(options.ks), catalog.n_items)
    deep = min(max(top_k, options.fuse_depth), catalog.n_items)
    if not width:
        return Query(deep, None, options.exclude_history)
    if top_k > width and not partial:
        raise UserError(f"--k: {max(options.ks)} needs a beam.width of at least that; it is {width}")
    if options.fuse_depth > width:
        raise UserError(
            f"--fuse_depth: {options.fuse_depth} needs a beam.width of at least that; it is {width}"
        )
    return Query(min(deep, width), width, options.exclude_history)


@contextlib.contextmanager
def _serve(config: Config, catalog: Catalog, options: Options) -> Iterator[Served]:
    """The server at the URL, or an engine of this process, to answer the examples."""
    if options.url:
        from jgr.client.remote import Client
        from jgr.evaluation.client import RemoteServer

        with Client(options.url, config.server.api_key, ca_file=options.ca_file) as client:
            yield RemoteServer(client, catalog, config.model.name)
        return
    from jgr.evaluation.recommendations import LocalEngine
    from jgr.serving.versions.loading import load_any

    with contextlib.ExitStack() as stack:
        with console.progress_bar("compiling") as bar:
            loaded = load_any(config, kinds=("recommend",))  # which a generator is asked
            engine = LocalEngine(loaded, catalog, config.server.drain_timeout_s, bar)
            stack.enter_context(engine)
        yield engine


@contextlib.contextmanager
def _answers(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar, moved by calls with the number of further examples that are answered."""
    with console.progress_bar(label) as bar:
        answered = 0

        def more(count: int) -> None:
            nonlocal answered
            answered += count
            bar(answered, total, "")

        yield more
