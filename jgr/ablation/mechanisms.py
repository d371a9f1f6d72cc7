# SPDX-License-Identifier: Apache-2.0
"""The table: which mechanism of which paper is which switch of the configuration.

The one idea: the table is the only place that knows. `jgr ablate` runs what it says, `jgr ablate --list` prints it, and
docs/ablations.md is written from it. A further system is an entry of its own file, named in SYSTEMS.
"""

from __future__ import annotations

from jgr.ablation.bat import BAT
from jgr.ablation.flame import FLAME
from jgr.ablation.hlem import HLEM
from jgr.ablation.rcllm import RCLLM
from jgr.ablation.system import System
from jgr.ablation.xgr import XGR
from jgr.config import UserError
from jgr.fields import nearest

SYSTEMS = {system.name: system for system in (BAT, XGR, FLAME, RCLLM, HLEM)}
"""All systems, by the name that the command takes."""


def find(name: str) -> System:
    """The system of a name. Raises UserError, which names the nearest."""
    if name not in SYSTEMS:
        raise UserError(
            f"there is no system '{name}' to take apart; the nearest is '{nearest(name, SYSTEMS)}'"
        )
    return SYSTEMS[name]
