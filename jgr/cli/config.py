# SPDX-License-Identifier: Apache-2.0
"""`jgr config [FOLDER]`: prints the configuration that --config, or a model folder, the environment and --set give.

What it prints is a file for --config that gives the same configuration. Secrets are redacted, and a file with
a redacted one is refused. `jgr config --list` prints the names that --config takes, each with what it configures.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from jgr.cli import console
from jgr.config import named
from jgr.config.formats import FORMATS, dump

HELP = "print the resolved configuration as a file for --config; --list: those that come with jgr"


def define_flags() -> None:
    flags.DEFINE_enum("format", "json", FORMATS, "how the configuration is written")
    flags.DEFINE_bool("list", False, "print the names that --config takes in place of a file")


def main(argv: Sequence[str]) -> None:
    if flags.FLAGS.list:
        console.refuse_arguments(argv)
        names = named.names()
        width = max(map(len, names))
        print("\n".join(f"{name:<{width}}  {named.summary(name)}" for name in names))
        print(f"The files: {named.folder()}")
    else:
        print(dump(console.load_folder(flags.FLAGS, argv), flags.FLAGS.format), end="")
