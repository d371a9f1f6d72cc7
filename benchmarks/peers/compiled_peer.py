# SPDX-License-Identifier: Apache-2.0
"""The PyTorch form by hand (pytorch_peer.py) through torch.compile: a program for each shape, as jgr has them.

Compiled are the prompt's pass and a beam step's; what chooses the beams, which is some calls of torch's own kernels, is
as it was. It takes a C++ compiler.
"""

from __future__ import annotations

import os

import torch

from benchmarks.peers.lines import serve
from benchmarks.peers.pytorch_peer import Search

SHAPES = 256
"""More than are asked for: beyond its limit torch goes back to what is not compiled, without a word."""

if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch._dynamo.config.recompile_limit = SHAPES
    torch._dynamo.config.accumulated_recompile_limit = SHAPES * 8
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    serve(lambda folder: Search(folder, compiled=True).answer, ("torch",))
