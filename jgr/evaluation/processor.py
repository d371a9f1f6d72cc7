# SPDX-License-Identifier: Apache-2.0
"""What a processor is called and which vectors it computes with: machines of one name differ by times in both."""

from __future__ import annotations

import platform
from typing import NamedTuple

WIDEST = (
    ("AMX", {"amx_tile"}),
    ("AVX-512", {"avx512f", "avx512dq", "avx512bw", "avx512vl"}),
    ("AVX2", {"avx2", "fma"}),
    ("SVE", {"sve"}),
    ("NEON", {"asimd"}),
)
"""Sets of instructions by their flags in /proc/cpuinfo, of each architecture the widest first."""


class Processor(NamedTuple):
    """cpu: its name, with family and model where the kernel tells them, since machines of a cloud are often called by
    their maker's name alone. instructions: its widest vectors, "" where that is not known."""

    cpu: str
    instructions: str


def processor(cpuinfo: str) -> Processor:
    """The first processor of a text such as /proc/cpuinfo holds."""
    first = cpuinfo.split("\n\n", 1)[0]
    fields = {
        name.strip(): value.strip() for name, _, value in (x.partition(":") for x in first.splitlines())
    }
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    cpu = fields.get("model name", platform.machine())
    if {"cpu family", "model"} <= fields.keys():
        cpu += f", family {fields['cpu family']} model {fields['model']}"
    return Processor(cpu, next((name for name, needed in WIDEST if needed <= flags), ""))
