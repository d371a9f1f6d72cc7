# SPDX-License-Identifier: Apache-2.0
"""`jgr serve`: an engine behind HTTP, until SIGTERM or Ctrl-C.

The URL is printed to stdout once requests are served; everything else goes to stderr. SIGHUP reads the model's
folder again. Exit codes: 0 after a drain or a stop before there was a model, 1 where the warm-up failed, 2 for a
configuration that cannot be served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from jgr.cli import console
from jgr.config import Config

if TYPE_CHECKING:
    from jgr.serving.deployment import Load
    from jgr.serving.engine import Engine

HELP = "serve recommendations over HTTP"

JOIN_TIMEOUT_S = 1.0


def define_flags() -> None:
    flags.DEFINE_string(
        "api_key", None, "what clients must send as 'Authorization: Bearer ...'; sets server.api_key"
    )
    flags.DEFINE_integer("port", None, "port to listen on, 0 for any; sets server.port")
    flags.DEFINE_bool("null", False, "serve numbered items without a model, to measure the server alone")


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    config = console.load(flags.FLAGS)
    given = {"api_key": flags.FLAGS.api_key, "port": flags.FLAGS.port}
    server = dataclasses.replace(config.server, **{k: v for k, v in given.items() if v is not None})
    config = dataclasses.replace(config, server=server)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the folder is being read already
    return serve(*make_engine(config, null=flags.FLAGS.null), config)


def make_engine(config: Config, null: bool) -> tuple[Engine, Load | None]:
    """The engine of a configuration, and what makes the next one. What is slow to import is imported here."""
    if null:
        from jgr.serving.null import null_engine

        return null_engine(config), None
    from jgr.serving.loading import load_engine

    return load_engine(config), partial(load_engine, config)


def serve(engine: Engine, load: Load | None, config: Config) -> int:
    """Serve until a signal. The exit code."""
    from jgr.serving.listener import Listener

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(console.progress_bar("compiling"))

        def announce(url: str) -> None:
            stack.close()
            print(url, flush=True)

        listener = Listener(engine, config, load=load, on_progress=bar, on_ready=announce)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, listener.handle_exit)
        code = listener.serve_until_stopped()
    if not listener.deployment.join(JOIN_TIMEOUT_S):
        # The device cannot be interrupted, and Python must not be torn down under a thread that is inside it.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing was accepted, so nothing is lost; and no thread that is loading is waited for.
    print("jgr: stopped before the model was loaded", file=sys.stderr, flush=True)
    os._exit(0)
