# SPDX-License-Identifier: Apache-2.0
"""Makes jgr/serving/http/kserve.binpb of kserve.proto: `pip install grpcio-tools`, `python -m tools.compile_proto`.

What is committed is the file's descriptor and no generated Python, which would fit few versions of protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import app

FOLDER = Path(__file__).resolve().parents[1] / "jgr" / "serving" / "http"


def compile_to(path: Path) -> None:
    """Write the descriptor set of kserve.proto, one file without its comments. RuntimeError where protoc fails."""
    from grpc_tools import protoc

    code = protoc.main(["protoc", f"-I{FOLDER}", f"--descriptor_set_out={path}", "kserve.proto"])
    if code:
        raise RuntimeError(f"protoc ended with exit code {code}")


def main(argv: Sequence[str]) -> None:
    del argv
    compile_to(FOLDER / "kserve.binpb")


if __name__ == "__main__":
    app.run(main)
