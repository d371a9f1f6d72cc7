# SPDX-License-Identifier: Apache-2.0
"""`jgr config [FOLDER]`: prints the configuration that --config, or a model folder, the environment and --set give.

What it prints is a file for --config that gives the same configuration. Secrets are redacted, and a file with
a redacted one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from jgr.cli import console
from jgr.config_formats import FORMATS, dump

HELP = "print the resolved configuration, as a file for --config"


def define_flags() -> None:
    flags.DEFINE_enum("format", "json", FORMATS, "how the configuration is written")


def main(argv: Sequence[str]) -> None:
    print(dump(console.load_folder(flags.FLAGS, argv), flags.FLAGS.format), end="")
