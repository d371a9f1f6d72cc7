# SPDX-License-Identifier: Apache-2.0
"""Logs and progress bars: what reaches stderr, in a process of its own so that pytest's handlers stay."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime

SETUP = "import logging; from jgr.cli import console; log = logging.getLogger('jgr.x')\n"


def _stderr(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_logs_are_one_object_a_line() -> None:
    first, second = _stderr(
        "console.set_up_logging('json', 'info')\n"
        "log.info('served %d', 3, extra={'beam_width': 8})\n"
        "log.debug('left out')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.exception('two\\nlines')\n"
    )
    info = json.loads(first)
    assert datetime.fromisoformat(info.pop("time")).tzinfo == UTC
    assert info == {"level": "info", "logger": "jgr.x", "message": "served 3", "beam_width": 8}
    error = json.loads(second)
    assert (error["level"], error["message"]) == ("error", "two\nlines")
    assert error["exception"].endswith("ZeroDivisionError: division by zero")


def test_human_logs_and_levels() -> None:
    lines = _stderr(
        "console.set_up_logging('human', 'debug')\n"
        "log.debug('ours')\n"
        "logging.getLogger('other').info('left out')\n"
        "logging.getLogger('other').warning('theirs')\n"
    )
    assert len(lines) == 2
    assert re.fullmatch(r"\d\d:\d\d:\d\d DEBUG   jgr\.x: ours", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING other: theirs", lines[1])


def test_progress_yields_everything_and_is_quiet_without_a_terminal() -> None:
    assert (
        _stderr(
            "assert list(console.progress(range(5), 'count')) == [0, 1, 2, 3, 4]\n"
            "with console.progress_bar('compile') as show: show(1, 2, 'a'); show(2, 2, 'b')\n"
        )
        == []
    )


def test_progress_bar_shows_done_total_and_note_on_a_terminal() -> None:
    code = (
        "import io, sys\n"
        "class Terminal(io.StringIO):\n"
        "    def isatty(self): return True\n"
        "real, sys.stderr = sys.stderr, Terminal()\n"
        "with console.progress_bar('compile') as show: show(1, 3, 'first'); show(3, 3, 'last')\n"
        "print(sys.stderr.getvalue().split('\\r')[-1], file=real)\n"
    )
    last = "".join(_stderr(code))
    assert last.startswith("compile: 100%")
    assert "3/3" in last
    assert "last" in last
