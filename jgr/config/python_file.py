# SPDX-License-Identifier: Apache-2.0
"""Runs a configuration, which is a Python file, and finds the line that an error in it comes from."""

from __future__ import annotations

import importlib.machinery
import sys
import traceback
import types
from pathlib import Path
from typing import NoReturn


def run_python(path: Path) -> types.ModuleType:
    """Run the file as a module of its own. Raises whatever the file raises."""
    module = types.ModuleType("jgr_config_file")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses of the file look their annotations up there
    _ConfigFile(module.__name__, str(path)).exec_module(module)
    return module


class _ConfigFile(importlib.machinery.SourceFileLoader):
    """Loads a Python file without a bytecode cache: its key has whole seconds and would hide a quick second edit."""

    def path_stats(self, path: str) -> NoReturn:
        raise OSError("no modification time, so that nothing is cached")


def line_in(path: Path, error: BaseException) -> int | None:
    """The number of the last line of `path` that ran before `error`, or of the line that does not parse."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
