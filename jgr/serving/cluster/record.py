# SPDX-License-Identifier: Apache-2.0
"""What a fleet serves by now, after its changes: what a replica that starts later must serve too.

The coordinator keeps it, and each replica has a copy, from which a coordinator that was lost gets it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jgr.serving.cluster.protocol import received, sent
from jgr.serving.versions.served_state import State

States = Mapping[str, State]
_EMPTY: dict[str, Any] = {}  # nobody writes to it


class Record(NamedTuple):
    """source: of what was deployed; that of another is of no use. number: so many changes are in it; 0: no replica has
    served yet. states: of the models by their names. bodies: compressed catalogs by their versions.
    """

    source: str = ""
    number: int = 0
    states: States = _EMPTY
    bodies: Mapping[str, bytes] = _EMPTY

    def __reduce__(self) -> Any:
        states = {name: tuple(state) for name, state in self.states.items()}
        return sent((self.source, self.number, states, self.bodies))

    @staticmethod
    def received(message: Any) -> Record:
        """The record as it was sent. Raises Incompatible where the sender speaks another protocol."""
        found = received(Record, message)
        return found._replace(states=plain(found.states))

    def agrees(self, states: States) -> bool:
        """Whether answers come from the same versions."""
        return served(self.states) == served(states)

    def after(self, states: States, uploaded: tuple[str, str, bytes] | None = None, most: int = 4) -> Record:
        """The record after a change that has brought all replicas to `states`.

        uploaded: a model, the version of a catalog that was uploaded for it, and its body, compressed. most: uploads
        that are kept of each model, beside those that are served or may be gone back to.
        """
        bodies = dict(self.bodies)
        added: dict[str, tuple[str, ...]] = {}
        if uploaded is not None:
            model, version, body = uploaded
            added[model], bodies[version] = (version,), body
        found = {
            name: state._replace(uploads=_kept(self._uploads(name), added.get(name, ()), state, most))
            for name, state in states.items()
        }
        kept = {version for state in found.values() for version in state.uploads}
        return Record(
            self.source,
            self.number + 1,
            found,
            {version: body for version, body in bodies.items() if version in kept},
        )

    def later(self) -> Record:
        """The same, which is heard by those that know this one."""
        return self._replace(number=self.number + 1)

    def merged(self, told: Record) -> Record:
        """The later record, with the bodies that are known here and still of use."""
        kept = {version for state in told.states.values() for version in state.uploads}
        bodies = {**self.bodies, **told.bodies}
        return told._replace(bodies={version: body for version, body in bodies.items() if version in kept})

    def _uploads(self, name: str) -> tuple[str, ...]:
        return self.states[name].uploads if name in self.states else ()


NOTHING = Record()


def plain(states: Mapping[str, Any]) -> States:
    """States as they were sent."""
    return {name: State(*state) for name, state in states.items()}


def served(states: States) -> dict[str, tuple[str, str, str]]:
    """What answers come from, see `State.served`."""
    return {name: state.served for name, state in states.items()}


def latest(records: Iterable[Record], source: str) -> Record:
    """The one with the most changes, of what was deployed as `source`."""
    mine = [record for record in records if record.source == source]
    return max(mine, key=lambda record: record.number, default=Record(source))


def _kept(before: tuple[str, ...], added: tuple[str, ...], state: State, most: int) -> tuple[str, ...]:
    """Versions, the oldest first: what is in use, and the last few."""
    all_ = [version for version in before if version not in added] + list(added)
    in_use = (state.catalog, state.previous)
    return tuple(version for at, version in enumerate(all_) if version in in_use or at >= len(all_) - most)


class NoOthers:
    """What a replica that is in no fleet learns of the others: nobody serves anything else."""

    async def record(self, source: str) -> Record:
        return Record(source)

    async def joins(self, source: str, name: str, states: States) -> Record:
        return Record(source)
