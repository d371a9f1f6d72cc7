# SPDX-License-Identifier: Apache-2.0
"""Where the device's time goes: an XLA profiler trace, read back and summed by stage and by operation.

The one idea: a trace names operations ("fusion.12"), the compiled program says where each came from
("jit(recommend)/prefill/while/body/attention/dot_general"). Joined, the named scopes of the models are the stages.
An operation's time is its own: what control flow contains is counted where it stands, and once. Operations of several
threads may overlap, so their sum can exceed the busy time, which is the union.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jgr.config import UserError

OTHER = "other"
"""The stage of what stands outside the named scopes, or has lost its name in the compiler."""

_PARTS = ("attention", "mlp", "head")
_STAGE = re.compile(r"prefill|decode|(beam_step|score)_\d+")
# "name = type opcode(": the type may be a tuple with spaces and comments, the opcode is the first word before a "(".
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\S|\s(?![a-z][\w\-]*\())*\s([a-z][\w\-]*)\(")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")


class ProfilingError(UserError):
    """A trace without the events that a profile is made of."""


@dataclass(frozen=True)
class Event:
    """One execution of an instruction. line: what it ran on, a thread or a stream; program: the trace's number."""

    line: str
    program: int
    name: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True)
class Instruction:
    """opcode of the compiled program; source: the path of scopes that it came from, "" where none is known."""

    opcode: str
    source: str


Program = Mapping[str, Instruction]


@dataclass(frozen=True)
class Operation:
    """One instruction, summed over its executions."""

    name: str
    stage: str
    source: str
    calls: int
    total_ns: float


@dataclass(frozen=True)
class Summary:
    """operations: longest first. stage_ns: their sums by stage, longest first. busy_ns: union; window_ns: all time."""

    operations: tuple[Operation, ...]
    stage_ns: dict[str, float]
    busy_ns: float
    window_ns: float


def read_program(hlo: str) -> Program:
    """The instructions of a compiled program's text (jax.stages.Compiled.as_text())."""
    found = {}
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            source = _SOURCE.search(line)
            found[match[1]] = Instruction(match[2], source[1] if source else "")
    return found


def read_events(folder: Path) -> list[Event]:
    """The executions of instructions in the one trace below `folder`. Raises ProfilingError where there are none."""
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"))
    if len(files) != 1:
        raise ProfilingError(f"{folder}: holds {len(files)} traces instead of one")
    found: dict[bool, list[Event]] = {True: [], False: []}
    for plane in ProfileData.from_file(str(files[0])).planes:
        on_device = plane.name.startswith("/device:")
        for number, line in enumerate(plane.lines):
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and not event.name.startswith("end: "):
                    program = int(stats.get("program_id", 0))
                    where = f"{plane.name} {number}"
                    found[on_device].append(
                        Event(where, program, str(stats["hlo_op"]), event.start_ns, event.duration_ns)
                    )
    events = found[True] or found[False]  # with a GPU, the host only launches
    if not events:
        raise ProfilingError(f"{folder}: the trace holds no executed instruction")
    return events


def stage_of(source: str) -> str:
    """ "prefill/attention", "decode/mlp", "beam step", "beam step/head", ... of a path of scopes; else OTHER."""
    scopes = re.findall(r"[\w\-]+", source)
    stage = next((match for match in map(_STAGE.fullmatch, scopes) if match), None)
    if stage is None:
        return OTHER
    name = (stage[1] or stage[0]).replace("_", " ")
    part = next((scope for scope in scopes if scope in _PARTS), "")
    return f"{name}/{part}" if part else name


def summarize(events: Sequence[Event], programs: Sequence[Program], window_ns: float) -> Summary:
    """Join a trace with the programs that may have run in it. window_ns: the time that the trace covers."""
    known = _match(events, programs)
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    calls: Counter[tuple[str, str, str]] = Counter()
    leaves = []
    nothing = Instruction("", "")
    for event in events:
        instruction = known[event.program].get(event.name, nothing)
        if instruction.opcode in _CONTAINERS:
            continue
        key = (event.name, stage_of(instruction.source), instruction.source)
        total[key] += event.duration_ns
        calls[key] += 1
        leaves.append(event)
    operations = [Operation(*key, calls[key], ns) for key, ns in total.items()]
    operations.sort(key=lambda op: (-op.total_ns, op.name))
    stages: Counter[str] = Counter()
    for op in operations:
        stages[op.stage] += op.total_ns  # type: ignore[assignment]  # a Counter sums floats as well
    return Summary(tuple(operations), dict(stages.most_common()), _union_ns(leaves), window_ns)


def _match(events: Iterable[Event], programs: Sequence[Program]) -> dict[int, Program]:
    """The program of each of the trace's numbers: the one that knows most of the names that ran under it."""
    names: defaultdict[int, set[str]] = defaultdict(set)
    for event in events:
        names[event.program].add(event.name)
    none: Program = {}
    return {
        number: max(programs, key=lambda program: len(seen & program.keys()), default=none)
        for number, seen in names.items()
    }


def _union_ns(events: Iterable[Event]) -> float:
    busy, end = 0.0, float("-inf")
    for start, stop in sorted((e.start_ns, e.start_ns + e.duration_ns) for e in events):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy
