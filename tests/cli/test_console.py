# SPDX-License-Identifier: Apache-2.0
"""Logs and progress bars: what reaches stderr, in a process of its own so that pytest's handlers stay."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime

from jgr.cli.console import Teller

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


def test_without_a_terminal_progress_is_a_line_of_the_log() -> None:
    lines = _stderr(
        "console.set_up_logging('human', 'info')\n"
        "assert list(console.progress(range(5), 'count', 5)) == [0, 1, 2, 3, 4]\n"
        "with console.progress_bar('compile') as show: show(0, 2, ''); show(1, 2, 'a'); show(2, 2, 'b')\n"
    )
    assert len(lines) == 2
    assert re.search(r"count: 5 of 5, [\d.e+]+ a second$", lines[0])
    assert re.search(r"compile: 2 of 2, [\d.e+]+ a second, b$", lines[1])


def test_a_teller_tells_now_and_then_at_which_pace_and_how_long_it_takes() -> None:
    now_s, told = 0.0, list[str]()
    teller = Teller("training", told.append, lambda: now_s)
    teller(300, 4000, "compiling")  # a run that goes on
    for done in range(301, 4001):
        now_s += 0.5 if done > 3000 else 2.0
        teller(done, 4000, f"loss {done}")
    assert len(told) == 2700 // 5 + 1000 // 20 + (told[-1] != told[-2])
    assert told[0] == "training: 305 of 4000, 2 s each, 2:03:10 left, loss 305"
    assert told[-2:] == ["training: 3980 of 4000, 1.59 s each, 0:32 left, loss 3980", "training: 4000 of 4000, 1.59 s each, loss 4000"]  # fmt: skip


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


def test_a_bar_on_a_terminal_counts_only_what_was_done_since_it_began_and_logs_stand_above_it() -> None:
    code = (
        "import io, sys\n"
        "class Terminal(io.StringIO):\n"
        "    def isatty(self): return True\n"
        "real, sys.stderr = sys.stderr, Terminal()\n"
        "console.set_up_logging('human', 'info')\n"
        "with console.progress_bar('training') as show:\n"
        "    show(40, 50, 'compiling'); log.info('above'); show(50, 50, 'loss 2')\n"
        "print(sys.stderr.getvalue().replace('\\r', '\\n'), file=real)\n"
    )
    lines = [line for line in _stderr(code) if line.strip()]
    above = next(at for at, line in enumerate(lines) if line.endswith("INFO    jgr.x: above"))
    assert "40/50" in lines[above - 2] + lines[above - 1] and "compiling" in "".join(lines[:above])
    assert "50/50" in lines[-1] and "loss 2" in lines[-1]
