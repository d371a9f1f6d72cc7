# SPDX-License-Identifier: Apache-2.0
"""Events as a raw folder of `--source=generic`, and one small log of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jgr.data.preparation.prepare import Options

LOG = [(f"u{i % 3}", f"i{(i * i) % 5}", i) for i in range(20)]


def write_rows(
    folder: Path, rows: Sequence[tuple[Any, ...]], fields: str = "user_id item_id timestamp split"
) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(dict(zip(fields.split(), row, strict=False))) + "\n" for row in rows]
    (folder / "interactions.jsonl").write_text("".join(lines))
    return folder


def log_options(folder: Path) -> Options:
    return Options("generic", write_rows(folder / "raw", LOG), folder / "out")
