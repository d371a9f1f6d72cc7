# SPDX-License-Identifier: Apache-2.0
"""The `jgr` command as a user meets it, each run in a process of its own."""

import gc
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from absl import flags

import jgr.cli
from jgr import logs
from jgr.cli import config as cli_config
from jgr.cli import console
from jgr.cli.main import COMMANDS, run, told
from jgr.config import Config, named, override, to_json
from tests.commands import run_here

PARTS = ("main", "console", "bench_serve", "completion_scripts", "heap")
"""Modules of jgr/cli/ that are no command."""
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def _jgr(*argv: str, code: str = RUN) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_alone_it_lists_every_command_in_a_line(argv: list[str]) -> None:
    done = _jgr(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.splitlines()[1:-1]]
    assert listed == list(COMMANDS)
    assert all(len(line) <= 110 for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("trian", "; did you mean 'train'? run 'jgr' for the list"), ("xyz", "; run 'jgr' for the list")],
)
def test_a_command_that_is_not(name: str, hint: str) -> None:
    done = _jgr(name)
    assert (done.returncode, done.stderr) == (2, f"jgr: there is no command '{name}'{hint}\n")


@pytest.mark.parametrize(
    ("define", "value", "words"),
    [
        (flags.DEFINE_integer, "x", "must be an integer"),
        (flags.DEFINE_float, "1,5", "must be a number"),
        (flags.DEFINE_bool, "maybe", "must be true or false"),
    ],
)
def test_a_flags_value_of_another_type_is_told_in_words(
    define: Callable[..., object], value: str, words: str
) -> None:
    values = flags.FlagValues()
    define("one", None, "", flag_values=values)
    with pytest.raises(flags.Error) as error:
        values(["jgr", f"--one={value}"])
    assert told(error.value) == f"flag --one={value}: {words}"


def test_every_command_module_is_registered_and_whole() -> None:
    modules = {f"jgr.cli.{m.name}" for m in pkgutil.iter_modules(jgr.cli.__path__)}
    assert set(COMMANDS.values()) == modules - {f"jgr.cli.{name}" for name in PARTS}
    for path in COMMANDS.values():
        command = importlib.import_module(path)
        assert "\n" not in command.HELP
        assert callable(command.define_flags)
        assert callable(command.main)


def test_cycles_are_looked_for_seldom_while_a_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def main(argv: list[str]) -> None:
        seen.append(gc.get_threshold())
        console.collect_as_usual()  # as a server does once it serves
        seen.append(gc.get_threshold())

    before = gc.get_threshold()
    monkeypatch.setattr(cli_config, "main", main)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    gc.set_threshold(700, 10, 10)
    try:
        assert run(["config"]) == 0
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
    assert seen == [(console.NEW_OBJECTS, 10, 10), console.USUAL]


def test_listing_loads_nothing_slow() -> None:
    slow = {"jax", "numpy", "optax", "orbax", "tokenizers", "uvicorn", "starlette", "tqdm", "matplotlib"}
    done = _jgr(code="import sys; from jgr.cli.main import run; run([]); print(*sys.modules)")
    assert slow & set(done.stdout.splitlines()[-1].split()) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_shared_flags(name: str) -> None:
    done = run_here(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"jgr {name}: ")
    about, _, shown = done.stdout.partition("\n  --")
    assert shown and (importlib.import_module(COMMANDS[name]).__doc__ or "").strip() in about
    for flag in ("--config ", "--set ", "--log_format ", "--log_level "):
        assert f"\n  {flag}" in done.stdout


def test_config_prints_the_file_with_its_overrides(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("from jgr.config import *\ndef get_config(): return Config(beam=BeamConfig(width=7))\n")
    done = _jgr("config", f"--config={path}", "--set", "profiles.tokens=8,16", "--set=server.port=0")
    assert (done.returncode, done.stderr) == (0, "")
    expected = override(Config(), "beam.width=7", "profiles.tokens=8,16", "server.port=0")
    assert json.loads(done.stdout) == to_json(expected)


def test_config_lists_the_configurations_by_name() -> None:
    done = _jgr("config", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, files = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == named.names()
    shop = next(line for line in lines if line.startswith("shop "))
    assert shop.split(maxsplit=1)[1].startswith("The synthetic shop: what `make demo` trains and serves.")
    assert files == f"The files: {named.folder()}"


EXTRAS = [
    (["train"], ["grain", "matplotlib", "optax", "orbax"], "train"),
    (["train", "--config=shop"], ["optax"], "train"),
    (["demo"], ["grain"], "train"),
    (["convert"], ["orbax"], "train"),
    (["ids", "--data=x", "--method=rqvae"], ["optax"], "train"),
    (["bench", "serve", "--rates=1", "--plot=a.png"], ["matplotlib"], "plot"),
    (["ablate", "bat", "--model=x", "--plot=a.png"], ["matplotlib"], "plot"),
    (["ablate", "bat"], ["orbax"], "train"),
]


@pytest.mark.parametrize(("argv", "missing", "extra"), EXTRAS)
def test_a_missing_extra_is_named_before_any_work(argv: list[str], missing: list[str], extra: str) -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    done = _jgr(*argv, code=RUN.replace("import sys; ", f"import sys; {hidden}"))
    assert (done.returncode, done.stdout) == (2, "")
    line = rf"jgr: [a-z -]+(--\w+=?\w*)? needs {', '.join(missing)}: pip install 'jgr\[{extra}\]'\n"
    assert re.fullmatch(line, done.stderr), done.stderr


def test_a_module_of_an_extra_that_was_not_asked_for_is_named_too() -> None:
    done = _run_with("sys.modules['optax'] = None; import optax")
    assert (done.returncode, done.stderr) == (2, "jgr: optax is not installed: pip install 'jgr[train]'\n")
    assert "Traceback" in _run_with("import no_such_module").stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["confg"], ["'confg'", "did you mean 'config'?"]),
        (["--set=beam.width=3"], ["the command comes before its flags"]),
        (["config", "--set=beam.widht=3"], ["'beam.widht'", "nearest is 'beam.width'"]),
        (["config", "--set=beam.width=0"], ["beam.width must be at least 1, not 0"]),
        (["config", "--config=/no/such.py"], ["/no/such.py", "no such config file"]),
        (["config", "--config=industral"], ["no configuration 'industral'; the nearest are industrial, "]),
        (["config", "--sett=x"], ["'sett'", "set"]),
        (["config", "--log_level=loud"], ["--log_level=loud", "debug|info|warning|error"]),
        (["config", "--set"], ["--set"]),
        (["config", "beam.width=3"], ["unexpected argument 'beam.width=3'"]),
        (["evaluate", "runs/a", "runs/b"], ["unexpected argument 'runs/b'"]),
        (["evaluate", "runs/a", "--config=b.py"], ["by its folder, runs/a, or by --config: leave out one"]),
        (["serve", "runs/none"], ["model.path: there is no model folder runs/none"]),
        (["serve", "x" * 300], ["model.path: there is no model folder xxx"]),
        (["serve", "--config=" + "x" * 300 + ".py"], ["xxx.py: File name too long"]),
        (["config", "a.py"], ["no model folder a.py; a configuration file is given as --config=a.py"]),
        (
            ["serve", "industrial"],
            ["no model folder industrial; a configuration is given as --config=industrial"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], words: list[str]) -> None:
    done = _jgr(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jgr: ")
    assert done.stderr.count("\n") == 1
    assert [word for word in words if word not in done.stderr] == []


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "beam.width=3"
    folder.mkdir()
    done = run_here("config", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"]["path"] == str(folder)
    done = run_here("convert", str(folder))
    assert (done.returncode, done.stderr) == (2, "jgr: --items is not set\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tune", "--vary=train.layers=1:2", "--set=train.evaluate_every=1", "--out={}"], "--out: no folder"),
        (["profile", "--out={}"], "--out: no folder"),
        (["top", "--record={}/run.jsonl"], "--record: {} is no folder"),
        (["train", "--config=controller", "--set=train.out={}"], "train.out: no folder"),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_one_line(tmp_path: Path, argv: list[str], words: str) -> None:
    there = tmp_path / "file"
    there.touch()
    done = run_here(*(arg.format(there) for arg in argv))
    assert (done.returncode, done.stdout) == (2, "")
    *_, line = done.stderr.splitlines()
    assert line.startswith("jgr: " + words.format(there)) and "Traceback" not in done.stderr


def _run_with(command_body: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose `main` is `command_body`."""
    return _jgr(
        code=f"""
import sys, types
from jgr.cli import main
from jgr.config import UserError
command = types.ModuleType("jgr.cli.fake")
def body(argv):
    {command_body}
command.HELP, command.define_flags, command.main = "fake", lambda: None, body
sys.modules["jgr.cli.fake"] = command
main.COMMANDS["fake"] = "jgr.cli.fake"
sys.exit(main.run(["fake", "one", "--log_level=error", "two"]))
"""
    )


def test_exit_codes() -> None:
    assert _run_with("return None").returncode == 0
    assert _run_with("return 3").returncode == 3
    interrupted = _run_with("raise KeyboardInterrupt")
    assert (interrupted.returncode, interrupted.stderr) == (130, "")
    mistake = _run_with(r"raise UserError('first\n  second')")
    assert (mistake.returncode, mistake.stderr) == (2, "jgr: first second\n")
    defect = _run_with("raise ValueError('ours')")
    assert defect.returncode == 1
    assert "Traceback" in defect.stderr


COMPILES = """
import os, signal, sys, threading, types
import jax, jax.numpy as jnp
from jgr.cli import main

def interrupt():
    frame = None
    while frame is None or frame.f_code.co_name != "backend_compile_and_load":
        frame = sys._current_frames()[threading.main_thread().ident]
    os.kill(os.getpid(), signal.SIGINT)

def long(x):
    for i in range(400):
        x = jnp.sort(x + i, axis=-1) @ x if i % 10 == 0 else jnp.sin(x) + i
    return x

def body(argv):
    jax.config.update("jax_enable_compilation_cache", False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is deaf to it
    print("compiling")
    threading.Thread(target=interrupt, daemon=True).start()
    for size in range(64, 1000):  # until one is met, which a busy machine may take long for
        jax.jit(long).lower(jnp.ones((size, size))).compile()

command = types.ModuleType("jgr.cli.fake")
command.HELP, command.define_flags, command.main = "fake", lambda: None, body
sys.modules["jgr.cli.fake"] = command
main.COMMANDS["fake"] = "jgr.cli.fake"
sys.exit(main.run(["fake"]))
"""


def test_an_interrupt_while_xla_compiles_ends_the_command_without_a_crash() -> None:
    done = _jgr(code=COMPILES)
    assert (done.returncode, done.stdout, done.stderr) == (130, "compiling\n", "")


def test_a_reader_that_leaves_is_not_an_error() -> None:
    done = _run_with("import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1); print('unread')")
    assert (done.returncode, done.stderr) == (141, "")


def test_arguments_that_are_not_flags_reach_the_command() -> None:
    assert _run_with("print(argv)").stdout == "['one', 'two']\n"


def test_without_a_device_the_refusal_is_one_line() -> None:
    folder = Path(__file__).parents[1] / "golden" / "hf" / "qwen2"
    done = subprocess.run(
        [sys.executable, "-c", RUN, "serve", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("jgr: there is no device to serve on: ")
