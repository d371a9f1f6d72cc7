# SPDX-License-Identifier: Apache-2.0
"""Prints what journals hold (`server.journal`): a line for each policy, with its replica, model, time and calls.

    python -m tools.show_journal FILE [FILE ...]

Each replica of a fleet writes a file of its own, whose name has the replica: day.jsonl becomes day.REPLICA.jsonl.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jgr.config import ConfigError
from jgr.serving.engine.journal import Closed, Opened, read


@dataclass
class Told:
    """A policy. calls: by the kind of event."""

    number: int
    model: str
    begun_ns: int
    last_ns: int
    calls: Counter[str] = field(default_factory=Counter)
    ended: bool = False


def policies(path: Path) -> list[Told]:
    """The policies of a journal, in the order of their beginnings. ConfigError for a damaged file."""
    found: dict[int, Told] = {}
    for line in read(path):
        event = line.event
        if isinstance(event, Opened):
            found[line.policy] = Told(line.policy, event.name, line.now_ns, line.now_ns)
            continue
        policy = found.get(line.policy)
        if policy is None:
            raise ConfigError(f"{path}: no line opens policy {line.policy}: the file's beginning is gone")
        policy.last_ns = line.now_ns
        if isinstance(event, Closed):
            policy.ended = True
        else:
            policy.calls[str(type(event).__struct_config__.tag)] += 1
    return list(found.values())


def lines(path: Path) -> Iterator[str]:
    """What is printed of a journal."""
    for policy in policies(path):
        seconds = (policy.last_ns - policy.begun_ns) / 1e9
        calls = ", ".join(f"{count} {name}" for name, count in sorted(policy.calls.items())) or "no calls"
        end = "" if policy.ended else "; goes on, or was cut off"
        yield f"{path.name}  policy {policy.number}  {policy.model}  {seconds:.1f} s: {calls}{end}"


def main(argv: Sequence[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        for name in argv:
            print("\n".join(lines(Path(name))))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
