# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels with the system's compiler: each instruction set from a file of its own, with its own flags.

The library has no Python in it; it is loaded by ctypes. It is built against the jaxlib that is installed. CFLAGS are
added to all flags, LDFLAGS to those of the linker.
"""

import platform
from typing import Any

import jax.ffi
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

X86 = platform.machine() in ("x86_64", "AMD64")
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"]
FLAGS = {
    # GCC 12's own header of intrinsics is warned of.
    "src/amx.cc": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-Wno-maybe-uninitialized"],
    "src/avx512.cc": AVX512,
    "src/avx2.cc": ["-mavx2", "-mfma"],
}
COMMON = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler._compile  # type: ignore[attr-defined]

        def with_flags(
            obj: str, src: str, ext: str, cc_args: list[str], args: list[str], pp_opts: Any
        ) -> None:
            compile_one(obj, src, ext, cc_args, [*args, *FLAGS.get(src, ())], pp_opts)

        self.compiler._compile = with_flags  # type: ignore[attr-defined]
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "jgr_native._kernels",
            ["src/handlers.cc", "src/generic.cc", *(FLAGS if X86 else ())],
            include_dirs=["src"],
            depends=[
                "src/kernels.h",
                "src/kernels.inc",
                "src/vectors.inc",
                "src/blocks.inc",
                "src/beams.inc",
                "src/mass.inc",
                "src/parallel.h",
            ],
            extra_compile_args=[*COMMON, "-isystem", jax.ffi.include_dir()],
            language="c++",
        )
    ],
    cmdclass={"build_ext": Build},
)
