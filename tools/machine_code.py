# SPDX-License-Identifier: Apache-2.0
"""What a kernel has become: the registers that it has, the bytes that it spills, and the instructions that matter.

XLA, Mosaic GPU and jax-triton leave a kernel's PTX in a folder; here ptxas makes an H200's code of it, and what that
says is counted. The programs are those that the package triton brings along, since the dialects may write newer PTX
than an installed toolkit knows.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

INSTRUCTIONS = {
    "HGMMA": "wgmma",
    "HMMA": "mma",
    "UTMALDG": "TMA",
    "LDGSTS": "cp.async",
    "MUFU": "exp and the like",
}
"""What is counted, by the name in an H200's code: products of a warpgroup and of a warp, loads by the TMA unit and by
threads, functions of the special units."""


class Code(NamedTuple):
    """A compiled kernel. spilt: bytes stored and loaded again; shared: bytes of shared memory a program asks for;
    counts: instructions by name, those of INSTRUCTIONS and "all"."""

    registers: int
    spilt: int
    shared: int
    counts: Counter[str]

    @property
    def problem(self) -> str:
        """What must not be, or "": a kernel that spills, or that multiplies by less than a warpgroup."""
        if self.spilt:
            return f"register spilling: {self.spilt} bytes"
        return "" if self.counts["HGMMA"] else "there is no wgmma in it"

    def __str__(self) -> str:
        counted = [
            f"{self.counts[name]} {called}" for name, called in INSTRUCTIONS.items() if self.counts[name]
        ]
        return (
            f"{self.registers} regs {self.shared / 1024:.0f} KiB, {', '.join(counted)} "
            f"of {self.counts['all']} instructions"
        )


def dump_into(folder: Path) -> None:
    """Have both dialects leave what they compile in `folder`: to be called before jax_triton is imported."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = os.environ["JAX_TRITON_DUMP_DIR"] = str(folder)
    if own := shutil.which("ptxas"):  # what XLA takes, which has to understand the PTX of Triton's
        os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = own


def newest(folder: Path, before: set[Path], kernel: str) -> Code:
    """Read the kernel of this name that was left in `folder`, in no file of `before`.

    Raises ValueError where there is not exactly one, and what `read` raises.
    """
    new = [x for x in folder.rglob("*.ptx") if x not in before and f".entry {kernel}(" in x.read_text()]
    if len(new) != 1:
        raise ValueError(f"{len(new)} kernels named {kernel} were left in the folder, not one")
    return read(new[0], kernel)


def read(ptx: Path, kernel: str) -> Code:
    """Compile PTX for an H200. Raises ImportError where triton is missing, and ValueError for what is not compiled."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise ImportError("the package triton is missing, whose ptxas and nvdisasm read the code")
    programs = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        said = _run(programs / "ptxas-blackwell", "-v", "-arch=sm_90a", ptx, "-o", cubin)
        return parse(kernel, said, _run(programs / "nvdisasm", "-c", cubin), _shared(ptx, kernel))


def parse(kernel: str, ptxas: str, listing: str, shared: int) -> Code:
    """Count what ptxas -v and nvdisasm say of this kernel. Raises ValueError where one of them does not name it."""
    said = re.split(r"Compiling entry function '", ptxas)
    own = next((x for x in said if x.startswith(f"{kernel}'")), "")
    registers = re.search(r"Used (\d+) registers", own)
    spilt = sum(int(n) for n in re.findall(r"(\d+) bytes spill", own))
    parts = re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.MULTILINE)
    text = next((x for x in parts if re.match(rf"{kernel}\b", x)), "")
    names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", text, re.MULTILINE)
    if registers is None or not names:
        raise ValueError("ptxas names no registers, or nvdisasm no instructions")
    return Code(int(registers[1]), spilt, shared, Counter(names) + Counter(all=len(names)))


def pallas_kernels(files: set[Path], registers_too: bool = False) -> str:
    """Shared memory of the Pallas kernels in a program's dump, and their registers, for which ptxas runs once more; jax
    0.11 dumps no PTX to count from."""
    shared: dict[str, int] = {}
    for path in files:
        if path.name.endswith("thunk_sequence.txt"):
            found = re.findall(r"kCustomKernel.*?\] (\S+) grid.*shared_memory: (\d+)", path.read_text())
            shared |= {name: int(size) for name, size in found}
    registers: dict[str, str] = {}
    ptxas = shutil.which("ptxas") if registers_too else None
    for path in files if ptxas and shared else ():
        if path.suffix == ".ptx" and any(f".entry {name}" in path.read_text() for name in shared):
            arguments = [str(ptxas), "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
            said = subprocess.run(arguments, capture_output=True, text=True, check=False).stderr
            registers |= dict(re.findall(r"entry function '(\S+)'.*?Used (\d+) registers", said, re.DOTALL))
    return ", ".join(
        f"{name} {registers[name] + ' regs ' if name in registers else ''}{size / 1024:.0f} KiB"
        for name, size in sorted(shared.items())
        if "fusion" not in name  # XLA's own
    )


def _shared(ptx: Path, kernel: str) -> int:
    """Shared memory, which is not in the PTX, but in another file that each compiler leaves beside it."""
    for name, found in (
        ("*.compile_info", rf"{kernel}: shared_mem_bytes: (\d+)"),
        (f"{ptx.stem}.mlir-passes.log", r"dynamic_shared_memory_size %c(\d+)_i32"),
        (re.sub(r"\d+\.ptx$", "thunk_sequence.txt", ptx.name), rf"\] {kernel} grid.*shared_memory: (\d+)"),
    ):
        for path in ptx.parent.glob(name):
            if size := re.search(found, path.read_text()):
                return int(size[1])
    raise ValueError(f"nothing beside {ptx.name} says how much shared memory the kernel takes")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout + done.stderr
