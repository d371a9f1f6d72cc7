# SPDX-License-Identifier: Apache-2.0
"""`jgr config [FOLDER]`: prints the configuration that --config, or a model folder, and --set give.

`jgr config --list` prints the names that --config takes, each with what it configures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from jgr import named_configs
from jgr.cli import console
from jgr.config import to_json

HELP = "print the resolved configuration as JSON; --list: the configurations that come with jgr"


def define_flags() -> None:
    flags.DEFINE_bool("list", False, "print the names that --config takes in place of a file")


def main(argv: Sequence[str]) -> None:
    if flags.FLAGS.list:
        console.refuse_arguments(argv)
        names = named_configs.names()
        width = max(map(len, names))
        print("\n".join(f"{name:<{width}}  {named_configs.summary(name)}" for name in names))
        print(f"The files: {named_configs.folder()}")
    else:
        print(json.dumps(to_json(console.load_folder(flags.FLAGS, argv)), indent=2))
