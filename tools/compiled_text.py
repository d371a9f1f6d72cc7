# SPDX-License-Identifier: Apache-2.0
"""What the text of a compiled program says that it copies, and where it reads weights in 8 bits."""

from __future__ import annotations

import math
import re

LARGE_COPY = 10_000_000
"""The bytes from which on a copy counts as large: copies of activations between kernels are smaller than that."""
_BITS = {"pred": 8, "bf16": 16}  # of other types the name says it: f32, s8, u64
_COPIES = {"copy", "slice", "dynamic-slice", "bitcast", "reshape"}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")


def large_copies(text: str) -> list[str]:
    """Instructions of a compiled program that write more than LARGE_COPY of what they only read, each as "name type".

    Such is a copy, a slice, or a fusion of nothing but these; and arguments of the program that are put side by side,
    as XLA does with matrices that have a factor in common. A transposition is none: it changes what is read.
    """
    computations: dict[str, list[tuple[str, ...]]] = {}
    for line in text.splitlines():
        if line.endswith("{") and " = " not in line:
            found = computations.setdefault(line.removeprefix("ENTRY ").lstrip("%").split(maxsplit=1)[0], [])
        elif match := _INSTRUCTION.match(line):
            found.append(match.groups())
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    copies = []
    for name, instructions in computations.items():
        given = {instruction for instruction, _, opcode, _ in instructions if opcode == "parameter"}
        for instruction, made, opcode, rest in () if name in fused else instructions:
            called = re.search(r"calls=%?([\w.-]+)", rest) if opcode == "fusion" else None
            inside = (
                computations[called[1]] if called else [(instruction, made, opcode.removesuffix("-start"))]
            )
            opcodes = {
                x[2] for x in inside if not x[1].endswith("[]")
            }  # numbers alone say where a slice begins
            moved = opcodes - {"parameter", "constant", "tuple", "bitcast"}
            read = set(re.findall(r"%([\w.-]+)", rest.split(")")[0]))
            if (
                moved
                and moved <= (_COPIES | {"concatenate"} if read <= given else _COPIES)
                and _bytes(made) > LARGE_COPY
            ):
                copies.append(f"{instruction} {made}")
    return copies


def _bytes(made: str) -> int:
    """The bytes of a type, such as bf16[28,8]{1,0}, or of a tuple of types."""
    return sum(
        math.prod(map(int, filter(None, sides.split(","))))
        * (_BITS.get(kind) or int(kind.strip("abcdefgsu")))
        // 8
        for kind, sides in re.findall(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]", made)
    )


_APART = re.compile(r"^%(?!gemm_fusion)\S+ \([^)]*\b[su]8\[\d+,\d+\][^)]*\) -> .*\{$", re.MULTILINE)


def matrices_apart(text: str) -> int:
    """How many matrices in 8 bits are read by another computation than the kernel of a product."""
    return len(_APART.findall(text))
