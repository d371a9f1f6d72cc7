# SPDX-License-Identifier: Apache-2.0
"""`jgr top [URL]`: what the replicas of a fleet, or one server, do now: a table that is drawn anew every second.

Each line tells of the seconds between two looks at /metrics and /v1/models. With --once there is one table, for
scripts; with --json there are JSON objects in place of tables, one a line. --record keeps them in a file besides, and
--picture draws such a file.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import UserError
from jgr.fields import one_line, printable

if TYPE_CHECKING:
    from jgr.client.remote import Client
    from jgr.traffic.view import Look, View

HELP = "[URL]: show what a server, or each replica of a fleet, does now"

PATIENCE_S = 10.0
"""So long a look may take."""
SHORTEST_S = 0.05
OWN_SCREEN, CURSOR_OFF, CURSOR_ON, USUAL_SCREEN = "\x1b[?1049h", "\x1b[?25l", "\x1b[?25h", "\x1b[?1049l"
HOME, REST_OF_LINE, REST = "\x1b[H", "\x1b[K", "\x1b[J"


def define_flags() -> None:
    flags.DEFINE_string(
        "api_key", None, "key to send as 'Authorization: Bearer ...'; default: server.api_key"
    )
    console.define_ca_file()
    flags.DEFINE_float("interval", 1.0, "seconds between two looks", lower_bound=SHORTEST_S)
    flags.DEFINE_bool("once", False, "print one table, of one interval, and end")
    flags.DEFINE_bool("json", False, "print JSON objects in place of tables, one a line")
    flags.DEFINE_string("record", None, "file to write every view to, as a JSON line; it must not be there")
    flags.DEFINE_string("picture", None, "SVG or PNG file to draw of the file that --record wrote: [FILE]")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    console.refuse_arguments(argv[1:])
    if values.picture:
        return _draw(argv, Path(values.picture))
    if not math.isfinite(values.interval):
        raise UserError("--interval must be a finite number")
    config = console.load(values)
    from jgr.client.remote import Client
    from jgr.files import refuse_overwriting

    server = config.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    url = argv[0] if argv else f"{'https' if server.tls_certificate else 'http'}://{host}:{server.port}"
    key = server.api_key if values.api_key is None else values.api_key
    if values.record and Path(values.record).exists():
        refuse_overwriting(Path(values.record), values.overwrite, "--record", "a record")
    if values.record and not Path(values.record).parent.is_dir():
        raise UserError(f"--record: {Path(values.record).parent} is no folder")
    with Client(url, key or None, timeout_s=PATIENCE_S, ca_file=values.ca_file) as client:
        with _kept(values.record) as keep:
            try:
                _watch(client, url, values.interval, values.once, values.json, keep)
            except KeyboardInterrupt:  # the usual end of it
                return 0
    return 0


def _draw(argv: Sequence[str], picture: Path) -> int:
    if not argv:
        raise UserError("--picture draws a file that --record wrote: jgr top --picture=run.svg run.jsonl")
    extras.require("plot", "--picture")
    from jgr.traffic import view_file

    view_file.check_picture(picture)
    view_file.draw(view_file.read(Path(argv[0])), picture)
    return 0


@contextlib.contextmanager
def _kept(path: str | None) -> Iterator[Callable[[View], None]]:
    """What keeps a view in the file, at once; nothing where none is named.

    The first view makes the file: one that a failed start left empty would refuse the next start.
    """
    if not path:
        yield lambda view: None
        return
    from jgr.traffic import view_file

    with contextlib.ExitStack() as opened:
        files: list[io.FileIO] = []

        def keep(view: View) -> None:
            line, done = memoryview(view_file.line(view)), 0
            try:
                if not files:
                    files.append(opened.enter_context(Path(path).open("wb", buffering=0)))
                while done < len(line):  # a full disk may take a part
                    done += files[0].write(line[done:])
            except OSError as error:
                raise UserError(f"--record: {path}: {error.strerror}") from None

        yield keep


def views(
    client: Client,
    name: str,
    interval_s: float,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[View | str]:
    """A view after each interval; in place of one, why there was no answer. name: of a server that is no fleet. Raises
    RequestFailed where the first look gets no answer."""
    from jgr.client.errors import RequestFailed
    from jgr.traffic.view import view

    before = _look(client, name, clock)
    while True:
        wait(interval_s)
        try:
            after = _look(client, name, clock)
        except RequestFailed as error:
            yield str(error)
            continue
        yield view(before, after, time.time())
        before = after


def _look(client: Client, name: str, clock: Callable[[], float]) -> Look:
    from jgr.client.errors import InternalError
    from jgr.serving.api import ModelList
    from jgr.traffic.view import look

    models = client.fetch("GET", "/v1/models", None, ModelList)
    text = client.read("/metrics")
    try:
        return look(text.decode(), models, clock(), name)
    except ValueError as error:
        raise InternalError(f"/metrics of {name} cannot be read: {error}") from None


def _watch(
    client: Client, url: str, interval_s: float, once: bool, as_json: bool, keep: Callable[[View], None]
) -> None:
    """Show views until somebody ends it. Raises RequestFailed where nothing answers at first, or for the one view."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background command ignores
    from jgr.client.errors import Unauthorized, Unavailable

    found = views(client, url.partition("://")[2].rstrip("/"), interval_s)
    try:
        first = next(found)  # before the screen is ours: an error is to be seen
    except Unauthorized as error:
        raise UserError(f"{url} asks for a client's key; see --api_key; it says: {one_line(error)}") from None
    if once and isinstance(first, str):
        raise Unavailable(first, "unavailable")
    drawn = sys.stdout.isatty() and not (once or as_json)
    with _own_screen() if drawn else contextlib.nullcontext():
        for shown in chain([first], [] if once else found):
            if not isinstance(shown, str):
                keep(shown)
            _show(shown, url, drawn, as_json)


def _show(shown: View | str, url: str, drawn: bool, as_json: bool) -> None:
    """Print a view, or why there is none. drawn: over what the terminal shows."""
    from jgr.traffic.view import lines
    from jgr.traffic.view_file import line

    if isinstance(shown, str):
        text = [shown]
    elif as_json:
        text = [line(shown).decode().rstrip()]
    else:
        text = list(map(printable, lines(shown)))
    if as_json and isinstance(shown, str):
        print(shown, file=sys.stderr, flush=True)
    elif not drawn:
        print("\n".join(text), flush=True)
    else:
        size = shutil.get_terminal_size()
        head = f"{url}  {time.strftime('%H:%M:%S')}  Ctrl-C ends"
        sys.stdout.write(page([head, "", *text], size.columns, size.lines))
        sys.stdout.flush()


def page(text: Sequence[str], columns: int, rows: int) -> str:
    """The lines as a terminal of that size shows them over what was there; what does not fit is left out."""
    most = max(1, rows - 1)
    if len(text) > most:
        text = [*text[: most - 1], f"... and {len(text) - most + 1} lines more"]
    return HOME + "".join(f"{line[:columns]}{REST_OF_LINE}\r\n" for line in text) + REST


@contextlib.contextmanager
def _own_screen() -> Iterator[None]:
    """What the terminal showed before is there again at the end."""
    sys.stdout.write(OWN_SCREEN + CURSOR_OFF)
    try:
        yield
    finally:
        sys.stdout.write(CURSOR_ON + USUAL_SCREEN)
        sys.stdout.flush()
