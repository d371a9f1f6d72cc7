# SPDX-License-Identifier: Apache-2.0
"""`jgr ablate bat|xgr|flame|rcllm|hlem`: what each mechanism of a paper does here, by switching it off alone.

Serves every variant in this process and asks all the same. Prints what each counted, whether the answers are the same,
and, where the machine was quiet, what a request took. Without --model the shop of `jgr demo` is served, by a model with
drawn weights. docs/ablations.md has the table of mechanisms, as `jgr ablate --list` prints it.

Exit code 1 where answers that must be the same are not.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import Config, DataConfig, UserError, override
from jgr.config.tree import secret_fields
from jgr.fields import REDACTED

if TYPE_CHECKING:
    from jgr.ablation.measure import Engine, Found
    from jgr.ablation.system import System, Variant
    from jgr.ablation.worlds import World

_engines = logging.getLogger("jgr.serving")
HELP = "switch each mechanism of a paper (bat, xgr, flame, rcllm, hlem) off alone, and count what changes"


def define_flags() -> None:
    flags.DEFINE_bool("list", False, "print which mechanism is which switch, and run nothing")
    flags.DEFINE_bool("quick", False, "a tiny model and a tenth of the requests: counts in a minute or two")
    flags.DEFINE_list("only", [], "mechanisms to switch off, by name; default: each of them")
    flags.DEFINE_string("model", None, "folder of a model to take apart; default: one with drawn weights")
    flags.DEFINE_string("data", None, "folder that jgr prepare wrote, whose users ask; default: the model's")
    flags.DEFINE_integer("requests", 480, "requests to each variant", lower_bound=1, upper_bound=1_000_000)
    flags.DEFINE_integer(
        "concurrency", None, "requests that are asked together; default: the system's", lower_bound=1, upper_bound=256
    )  # fmt: skip
    flags.DEFINE_integer(
        "rounds", 6, "turns that the variants take; the first is not timed", lower_bound=1, upper_bound=1000
    )
    flags.DEFINE_integer("users", 60, "users who ask, the first the most often", lower_bound=1)
    flags.DEFINE_list(
        "candidates", None, "candidates of a request to rank: a number, or LEAST,MOST; default: the system's"
    )
    flags.DEFINE_integer("seed", 0, "seed of the requests", lower_bound=0)
    flags.DEFINE_string("out", None, "JSON file for all that was found")
    flags.DEFINE_string("plot", None, "PNG or SVG file for a picture of it (needs jgr[plot])")


def main(argv: Sequence[str]) -> int:
    from jgr.ablation.mechanisms import SYSTEMS, find

    values = flags.FLAGS
    if values.list:
        from jgr.ablation.report import WIDTH, listing

        console.refuse_arguments(argv[1:])
        width = min(WIDTH, console.terminal_width() or WIDTH)
        print("\n".join(listing([find(argv[0])] if argv else SYSTEMS.values(), width)))
        return 0
    if not argv:
        raise UserError(f"name what to take apart: jgr ablate {'|'.join(SYSTEMS)}; --list says what each has")
    console.refuse_arguments(argv[1:])
    system = find(argv[0])
    _check(values)
    every = chosen(system, values.only)
    assignments = (*console.environment(), *values.set)
    refuse_switched(every, assignments)
    with ExitStack() as stack:
        if values.log_level == "info":  # each variant's engine would tell all that a server's start tells
            stack.callback(_engines.setLevel, _engines.level)
            _engines.setLevel(logging.WARNING)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-ablate-"))
        found = _run(system, every, assignments, values, Path(folder))
    from jgr.ablation import report

    print("\n".join(report.lines(found, console.terminal_width())))
    if values.out:
        _write(found, values)
    if values.plot:
        from jgr.ablation.plots import plot

        plot(found, Path(values.plot))
    wrong = [name for name, of in found.differences.items() if not of.is_right]
    if wrong:
        print(f"answers that must be the same are not: {', '.join(wrong)}")
    return 1 if wrong else 0


def _check(values: flags.FlagValues) -> None:
    """Refuse now what could not be done after minutes of measuring."""
    if values.plot:
        from jgr.ablation.plots import check

        extras.require("plot", "--plot")
        check(Path(values.plot))
    if values.out and not Path(values.out).parent.is_dir():
        raise UserError(f"--out: there is no folder {Path(values.out).parent}")
    for flag, given in (("--out", values.out), ("--plot", values.plot)):
        if given and Path(given).is_dir():
            raise UserError(f"{flag}: {given} is a folder, and no file")
        if given and not os.access(Path(given).parent, os.W_OK):
            raise UserError(f"{flag}: nothing can be written to the folder {Path(given).parent}")
    if values.config:
        raise UserError("--config: jgr ablate takes a model's folder, --model, and single fields, --set")
    if not values.model:
        extras.require("train", "jgr ablate without --model")
    if values.quick and values.model:
        raise UserError("--quick draws a tiny model of its own: leave out --quick or --model")
    if values.data and not values.model:
        raise UserError("--data: the users of a dataset need a model of its items: name one with --model")


def _candidates(values: flags.FlagValues, system: System) -> tuple[int, int]:
    if values.candidates is None:
        return system.candidates
    try:
        given = [int(text) for text in values.candidates]
    except ValueError:
        given = []
    if len(given) not in (1, 2) or not 1 <= given[0] <= given[-1]:
        raise UserError("--candidates must be a number, or LEAST,MOST, as in --candidates=16 or 20,200")
    return given[0], given[-1]


def chosen(system: System, only: Sequence[str]) -> list[Variant]:
    """The variants that are run. only: names of mechanisms; empty: all. UserError for a name that none has."""
    from jgr.ablation.system import variants
    from jgr.fields import nearest

    known = [one.name for one in system.mechanisms]
    for name in only:
        if name not in known:
            near = nearest(name, known)
            raise UserError(f"--only: {system.name} has no mechanism '{name}'; the nearest is '{near}'")
    every = variants(system)
    return [one for one in every if one.mechanism is None or not only or one.mechanism.name in only]


def _run(
    system: System,
    every: Sequence[Variant],
    assignments: Sequence[str],
    values: flags.FlagValues,
    folder: Path,
) -> Found:
    """assignments: of --set and the environment, which hold for all variants."""
    from jgr.ablation import traffic
    from jgr.ablation.measure import measure
    from jgr.ablation.system import configured
    from jgr.client.embedded import Engine as Embedded

    candidates = _candidates(values, system)
    world = _world(system, values, folder)
    base = override(world.config, *assignments)
    configs = {variant.name: configured(base, variant.settings) for variant in every}
    if system.orders and configs[every[0].name].rank.method == "likelihood":
        raise UserError(
            "rank.method: this model ranks by likelihood, without candidates in the prompt; see docs/cache.md for "
            "the others, as in --set rank.method=item_probe"
        )
    n_requests = values.requests
    if values.quick and not values["requests"].present:
        n_requests //= 10
    longest = min(c.server.max_history for c in configs.values())
    top_k = min(traffic.TOP_K, *(c.beam.width for c in configs.values()))
    amount = traffic.Amount(n_requests, values.users, candidates, longest, top_k)

    def make(variant: Variant) -> Engine:
        return Embedded(configs[variant.name], kinds=[system.kind])

    timed = False
    if values.model and system.scores:
        with Embedded(configs[every[0].name]) as engine:
            timed = engine.info.timed
    requests = traffic.draw(system, world.dataset, amount, timed, values.seed)
    rounds = traffic.waves(requests, values.rounds, values.concurrency or system.concurrency)
    with console.progress_bar(f"ablating {system.name}") as bar:
        return measure(system, every, make, rounds, bar)


def _world(system: System, values: flags.FlagValues, folder: Path) -> World:
    from jgr.ablation import worlds

    if values.model:
        data = DataConfig(kind="prepared", path=values.data) if values.data else None
        return worlds.given(system, values.model, data)
    return worlds.made(system, folder, worlds.TINY) if values.quick else worlds.made(system, folder)


def refuse_switched(every: Sequence[Variant], assignments: Sequence[str]) -> None:
    """Raise UserError where an assignment, which holds for all variants, sets a field that tells them apart."""
    from jgr.ablation.system import LARGEST

    settings = [setting.partition("=") for variant in every for setting in variant.settings]
    own = {field for field, _, value in settings if value != LARGEST}
    for assignment in assignments:
        if assignment.partition("=")[0].strip() in own:
            raise UserError(f"--set {assignment}: the ablation itself sets this field; see jgr ablate --list")


def _write(found: Found, values: flags.FlagValues) -> None:
    from jgr.ablation import report
    from jgr.files import writing

    load = {
        "model": values.model,
        "seed": values.seed,
        "users": values.users,
        "rounds": values.rounds,
        "concurrency": values.concurrency or found.system.concurrency,
        "candidates": _candidates(values, found.system),
        "set": [_shown(assignment) for assignment in values.set],
    }
    about = {**_about(), "load": load}
    content = json.dumps(report.to_json(found, about), indent=1) + "\n"
    with writing(Path(values.out), UserError) as stream:
        stream.write(content.encode())


def _shown(assignment: str) -> str:
    """An assignment of --set as it may be written down: a key or a password is not."""
    field = assignment.partition("=")[0].strip()
    return f"{field}={REDACTED}" if field in secret_fields(Config) else assignment


def _about() -> Mapping[str, Any]:
    """The machine, the versions, and the commit where jgr runs from a checkout."""
    import importlib.metadata
    import platform
    from datetime import UTC, datetime

    import jgr
    from jgr.evaluation.machine import commit, machine

    root = Path(jgr.__file__).resolve().parents[1]
    measured_commit, dirty = commit(root) if (root / ".git").exists() else (None, None)
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), "jgr": jgr.__version__, **packages},
        "commit": measured_commit,
        "dirty": dirty,
    }
