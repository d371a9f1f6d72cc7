# SPDX-License-Identifier: Apache-2.0
"""`jgr config [FOLDER]`: prints the configuration that --config, or a model folder, and --set give."""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from jgr.cli import console
from jgr.config import to_json

HELP = "print the resolved configuration as JSON"


def define_flags() -> None:
    pass


def main(argv: Sequence[str]) -> None:
    print(json.dumps(to_json(console.load_folder(flags.FLAGS, argv)), indent=2))
