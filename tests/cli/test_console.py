# SPDX-License-Identifier: Apache-2.0
"""What all commands share. What logs and bars write is seen in a process of its own, so that pytest's handlers stay."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from jgr.cli.console import Teller, size_threads
from jgr.cli.main import run
from jgr.config import Config, override
from jgr.cores import cores_here
from jgr.fields import UserError

SETUP = (
    "import logging; from jgr import logs; from jgr.cli import console; log = logging.getLogger('jgr.x')\n"
)


def _stderr(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SETUP + code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_logs_are_one_object_a_line() -> None:
    first, second = _stderr(
        "logs.set_up('json', 'info')\n"
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
        "logs.set_up('human', 'debug')\n"
        "log.debug('ours')\n"
        "log.warning('a\\n  b\\x1b[2J%s', 5000 * 'c')\n"
        "logging.getLogger('other').info('left out')\n"
        "logging.getLogger('other').warning('theirs')\n"
    )
    assert len(lines) == 3
    assert re.fullmatch(r"\d\d:\d\d:\d\d DEBUG   jgr\.x: ours", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING jgr\.x: a b\ufffd\[2Jc{3990}\.\.\.", lines[1])
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING other: theirs", lines[2])


def test_without_a_terminal_quick_work_yields_everything_and_says_nothing() -> None:
    lines = _stderr(
        "logs.set_up('human', 'info')\n"
        "assert list(console.progress(range(5), 'count', 5)) == [0, 1, 2, 3, 4]\n"
        "with console.progress_bar('compile') as show: show(0, 2, ''); show(1, 2, 'a'); show(2, 2, 'b')\n"
    )
    assert lines == []


def test_without_a_terminal_long_work_is_a_line_of_the_log() -> None:
    lines = _stderr(
        "logs.set_up('human', 'info')\n"
        "console.TELL_EVERY_S = 0.0\n"
        "with console.progress_bar('compile') as show: show(1, 2, 'a'); show(2, 2, 'b')\n"
    )
    assert re.search(r"compile: 2 of 2, [\d.e+]+ a second, b$", lines[-1])


def test_a_teller_tells_now_and_then_at_which_pace_and_how_long_it_takes() -> None:
    now_s, told = 0.0, list[str]()
    teller = Teller("training", told.append, lambda: now_s)
    teller(300, 1000, "compiling")  # a run that goes on
    for done in range(301, 1001):
        now_s += 2.0 if done <= 400 else 0.25
        teller(done, 1000, f"loss {done}")
    assert len(told) == 100 // 5 + 600 // 40
    assert told[0] == "training: 305 of 1000, 2 s each, 23:10 left, loss 305"
    assert told[20] == "training: 440 of 1000, 4 a second, 2:20 left, loss 440"
    assert told[-2:] == [
        "training: 960 of 1000, 4 a second, 0:10 left, loss 960",
        "training: 1000 of 1000, 2 a second, loss 1000",
    ]


@pytest.mark.parametrize("compiled_s", [8.0, 30.0])
def test_a_teller_leaves_the_first_step_out_of_the_time_that_is_left(compiled_s: float) -> None:
    """It compiles."""
    now_s, told = 0.0, list[str]()
    teller = Teller("training", told.append, lambda: now_s)
    teller(0, 101, "compiling the step")
    for done in range(1, 102):
        now_s += compiled_s if done == 1 else 0.5
        teller(done, 101, "")
    first = ["training: 1 of 101"] if compiled_s > 10 else []
    later = 21 if first else 5
    assert told[: len(first) + 1] == [
        *first,
        f"training: {later} of 101, 2 a second, 0:{(101 - later) // 2} left",
    ]


def test_a_teller_counts_the_pace_of_each_work_from_its_own_beginning() -> None:
    now_s, told = 0.0, list[str]()
    teller = Teller("compiling", told.append, lambda: now_s)
    for model, seconds in (("a", 60.0), ("b", 20.0)):
        teller(0, 2, "")
        for done in (1, 2):
            now_s += seconds
            teller(done, 2, model)
    assert told == [
        "compiling: 1 of 2, a",
        "compiling: 2 of 2, 60 s each, a",
        "compiling: 1 of 2, b",
        "compiling: 2 of 2, 20 s each, b",
    ]


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
        "logs.set_up('human', 'info')\n"
        "with console.progress_bar('training') as show:\n"
        "    show(40, 50, 'compiling'); log.info('above'); show(50, 50, 'loss 2')\n"
        "print(sys.stderr.getvalue().replace('\\r', '\\n'), file=real)\n"
    )
    lines = [line for line in _stderr(code) if line.strip()]
    above = next(at for at, line in enumerate(lines) if line.endswith("INFO    jgr.x: above"))
    assert all("40/50" in line for line in lines[:above]) and "compiling" in lines[above - 1]
    assert "50/50" in lines[-1] and "loss 2" in lines[-1]


@pytest.mark.parametrize(
    ("on_terminal", "argv", "printed"),
    [
        (False, [], '{"ndcg": [1, null]}'),
        (False, ["--json"], '{"ndcg": [1, null]}'),
        (True, ["--json"], '{"ndcg": [1, null]}'),
        (True, [], "--json prints the whole result"),
    ],
)
def test_a_terminal_gets_a_document_only_where_it_is_asked_for(
    on_terminal: bool, argv: list[str], printed: str
) -> None:
    code = f"""
import sys
from absl import flags
from jgr.cli import console
console.define_json()
flags.FLAGS(["jgr", *{argv!r}])
sys.stdout.isatty = lambda: {on_terminal}
console.print_json({{"ndcg": [1, None]}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, printed + "\n"), done.stderr


COUNT = """
import glob, jax, os
for name in ("NPROC", "PJRT_NPROC"): os.environ.pop(name, None)
from jgr.config import Config, override
from jgr.cores import cores_here
console.size_threads([override(Config(), {setting!r})])
jax.numpy.ones(3).block_until_ready()
names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
log.warning("%d of %d", sum("Eigen" in name for name in names), cores_here())
"""
"""XLA names the threads of its pool after Eigen's."""


def test_a_core_that_is_left_to_the_host_is_none_that_the_model_works_with() -> None:
    def threads(setting: str) -> tuple[int, int]:
        (line,) = _stderr("logs.set_up('human', 'info')\n" + COUNT.format(setting=setting))
        threads, cores = re.findall(r"\d+", line.partition("jgr.x:")[2])
        return int(threads), int(cores)

    count, cores = threads("server.host_cores=0")
    assert count == cores
    if cores > 1:
        assert threads("server.host_cores=1") == (cores - 1, cores)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["server.host_cores={cores}"],
            "server.host_cores={cores} leaves no core to the model: there are {cores}",
        ),
        (["server.host_cores=1", "data_parallel.devices=2"], "server.host_cores is for models on one device"),
    ],
)
def test_cores_that_cannot_be_left_are_refused(settings: list[str], words: str) -> None:
    cores = cores_here()
    config = override(Config(), *(setting.format(cores=cores) for setting in settings))
    with pytest.raises(UserError, match=re.escape(words.format(cores=cores))):
        size_threads([config])


@pytest.mark.parametrize(
    ("command", "flag", "what"),
    [
        *(
            ("kv build runs/none --out=x", flag, "jgr kv library")
            for flag in ("texts=x", "text_field=text", "user_field=u", "prototypes=9", "held_out=0.2")
        ),
        ("catalog inspect --catalog=none.jsonl", "out=x", "jgr catalog build"),
        ("catalog inspect --catalog=none.jsonl", "overwrite", "jgr catalog build"),
        ("bench serve --config=shop", "share=0.9", "--find_capacity"),
        ("bench serve --config=shop", "max_probes=3", "--find_capacity"),
        *(
            ("profile --config=shop --costs=x", flag, "a trace of requests, which --costs does not make")
            for flag in ("requests=9", "requests_file=x", "concurrency=2", "top=3", "out=x")
        ),
    ],
)
def test_a_flag_without_effect_is_refused_with_what_uses_it(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, what: str
) -> None:
    assert run([*command.split(), f"--{flag}"]) == 2
    name = flag.partition("=")[0]
    assert capsys.readouterr().err == f"jgr: --{name} has no effect here: it is for {what}\n"
