# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from jgr.evaluation.processor import processor

AMD = (
    "processor\t: 0\ncpu family\t: 23\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu fma avx2 sha_ni\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd evtstrm aes\nCPU implementer\t: 0x41\n"


def flags(*more: str) -> str:
    return AMD.replace("avx2", " ".join(("avx2", *more)))


@pytest.mark.parametrize(
    ("cpuinfo", "instructions"),
    [
        (AMD, "AVX2"),
        (flags("avx512f"), "AVX2"),  # jgr-native computes by all four or by none
        (flags("avx512f", "avx512dq", "avx512bw", "avx512vl"), "AVX-512"),
        (flags("avx512f", "avx512dq", "avx512bw", "avx512vl", "amx_tile", "amx_bf16"), "AMX"),
        (AMD.replace("fma avx2", "sse4_2"), ""),
        (ARM, "NEON"),
        (ARM.replace("asimd", "asimd sve"), "SVE"),
        ("", ""),
    ],
)
def test_the_widest_vectors_are_named(cpuinfo: str, instructions: str) -> None:
    assert processor(cpuinfo).instructions == instructions


def test_processors_of_one_name_are_told_by_family_and_model() -> None:
    later = AMD.replace(": 23", ": 25").replace(": 1", ": 17")
    assert processor(f"{AMD}\n{later}").cpu == "AMD EPYC, family 23 model 1"
    assert processor(f"{later}\n{AMD}").cpu == "AMD EPYC, family 25 model 17"
