# SPDX-License-Identifier: Apache-2.0
"""Copies golden arrays into tests/golden, so that a plain clone can be tested.

    python -m tools.copy_golden --source=../shared/golden --folders=hf,hstu,metrics

The folders are checked against the source's own manifest where it has one, replaced as a whole, and listed
with their hashes in tests/golden/MANIFEST.json, which a test verifies.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from jgr.config import UserError

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
MANIFEST = "MANIFEST.json"


def hashes(root: Path) -> dict[str, str]:
    """The sha256 of every file in the folders under `root`, keyed by its path from there."""
    files = sorted(p for p in root.glob("*/**/*") if p.is_file())
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def copy(source: Path, target: Path, folders: Sequence[str]) -> dict[str, str]:
    """Replace `folders` of `target` by those of `source`, write the manifest and return it.

    Raises UserError where a folder is missing, or a file differs from what the source's manifest says.
    """
    for folder in folders:
        if not (source / folder).is_dir():
            raise UserError(f"{source}: there is no folder '{folder}'")
    manifest = source / MANIFEST
    expected = json.loads(manifest.read_text()) if manifest.is_file() else {}
    wanted = {name: digest for name, digest in hashes(source).items() if name.split("/")[0] in folders}
    for name, digest in wanted.items():
        if name in expected and expected[name]["sha256"] != digest:
            raise UserError(f"{source / name} differs from its entry in {manifest}")
    for folder in folders:
        if (target / folder).exists():
            shutil.rmtree(target / folder)
    for name in wanted:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)  # without the permissions: the source may be read-only
    copied = hashes(target)
    (target / MANIFEST).write_text(json.dumps(copied, indent=1) + "\n")
    return copied


def main(argv: Sequence[str]) -> None:
    del argv
    try:
        copied = copy(Path(flags.FLAGS.source), GOLDEN, flags.FLAGS.folders)
    except UserError as e:
        sys.exit(f"copy_golden: {e}")
    print(f"{len(copied)} files in {GOLDEN}")


if __name__ == "__main__":
    flags.DEFINE_string("source", "../shared/golden", "the folder to copy from")
    flags.DEFINE_list("folders", ["hf", "hstu", "metrics"], "the folders to replace")
    app.run(main)
