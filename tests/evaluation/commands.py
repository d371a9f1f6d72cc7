# SPDX-License-Identifier: Apache-2.0
"""Several commands of jgr in one test's process: each defines its flags, which the next must not find."""

from __future__ import annotations

from absl import flags

from jgr.cli.main import run


def command(*arguments: str) -> int:
    """Run a command in this process; its exit code."""
    try:
        return run(list(arguments))
    finally:
        for module, defined in flags.FLAGS.flags_by_module_dict().items():
            for flag in list(defined) if module.startswith("jgr.cli.") else ():
                if flag.name in flags.FLAGS:
                    delattr(flags.FLAGS, flag.name)
