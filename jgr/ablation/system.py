# SPDX-License-Identifier: Apache-2.0
"""What an ablation is told of a system: its mechanisms, what switches each, and what is left where all are off.

A mechanism's numbers are those of its paper's specification, as BAT-5. What no field switches is listed too, with what
compares it: so nobody looks for a switch that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jgr.config import Config, override

LARGEST = "LARGEST"
"""Stands in a setting for the largest of the sizes that the model's own configuration has there."""
SAME = ""
"""What a mechanism's `differs` says where its answers must be those of the system without any mechanism."""


@dataclass(frozen=True)
class Mechanism:
    """What a paper describes and a field switches.

    name: for variants, without spaces. numbers: in the paper's specification. what: in words. settings: assignments as
    for --set that take it away from the system with all mechanisms; where `added`, that add it, since it is no part of
    that system. differs: why answers may differ from those without any mechanism; SAME: they may not.
    """

    name: str
    numbers: tuple[str, ...]
    what: str
    settings: tuple[str, ...]
    added: bool = False
    differs: str = SAME


@dataclass(frozen=True)
class Fixed:
    """What a paper describes and no field switches. instead: why, or what compares it."""

    numbers: tuple[str, ...]
    what: str
    instead: str


@dataclass(frozen=True)
class System:
    """A paper's system in jgr.

    name: of the command. kind: of the requests. shop: the sort of model that serves them. base: settings of the model
    that is drawn where nobody names one. on: the settings with all mechanisms; off: those with none. counts: names in
    `counts.COUNTS` that tell it apart. orders: whether a variant may put a prompt's parts in another order, and so give
    other scores; answers are then compared within an order. differs: why answers with all mechanisms may differ from
    those without any. concurrency: requests that are asked together, and candidates: the least and the most of one to
    rank, both unless told otherwise. grows: how many events more a user has at each visit than at the one before.
    """

    name: str
    title: str
    kind: Literal["recommend", "rank"]
    shop: Literal["ranker", "generator", "scorer", "history"]
    base: tuple[str, ...]
    on: tuple[str, ...]
    off: tuple[str, ...]
    mechanisms: tuple[Mechanism, ...]
    fixed: tuple[Fixed, ...]
    counts: tuple[str, ...]
    orders: bool = False
    differs: str = SAME
    concurrency: int = 8
    candidates: tuple[int, int] = (0, 0)
    grows: int = 0

    @property
    def scores(self) -> bool:
        """Whether its model is a scorer, and no decoder."""
        return self.shop in ("scorer", "history")


@dataclass(frozen=True)
class Variant:
    """A configuration that is run. settings: on top of the world's. differs: see Mechanism."""

    name: str
    settings: tuple[str, ...]
    differs: str = SAME
    mechanism: Mechanism | None = None


ALL, NONE = "all on", "all off"


def configured(base: Config, settings: Sequence[str]) -> Config:
    """The configuration of a variant. base: that of the model."""
    return override(base, *(_settled(setting, base) for setting in settings))


def _settled(setting: str, base: Config) -> str:
    field, _, value = setting.partition("=")
    if value != LARGEST:
        return setting
    section, name = field.split(".")
    return f"{field}={max(getattr(getattr(base, section), name))}"


def variants(system: System) -> list[Variant]:
    """What is run: all on, each mechanism off (or added) alone, all off."""
    found = [Variant(ALL, system.on, system.differs)]
    for one in system.mechanisms:
        name = f"{'with' if one.added else 'without'} {one.name}"
        found.append(Variant(name, (*system.on, *one.settings), one.differs, one))
    return [*found, Variant(NONE, system.off)]
