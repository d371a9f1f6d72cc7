# SPDX-License-Identifier: Apache-2.0
"""`jgr completion`: what is offered at the cursor, and the scripts in real shells."""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jgr.cli import console
from jgr.cli.completion import WORDS, candidates
from jgr.cli.completion_scripts import SCRIPTS
from jgr.cli.main import COMMANDS, run
from jgr.config import Config, named
from jgr.config.tree import field_types

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
SLOW = {"jax", "numpy", "optax", "orbax", "tokenizers", "uvicorn", "starlette", "tqdm", "matplotlib", "yaml"}
PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with some files, where `jgr` is on the path."""
    here = tmp_path / "here"
    for name in ("runs/shop", "my runs", ".hidden"):
        (here / name).mkdir(parents=True)
    for name in ("a.toml", "b.py", "c.txt", "keys.json", "two words.yaml"):
        (here / name).write_text("")
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "jgr"
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{RUN}" "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(here)
    return here


def test_commands_and_their_meanings() -> None:
    assert [candidate.word for candidate in candidates([""])] == list(COMMANDS)
    assert candidates(["comp"]) == [
        ("completion", "print the completion script of a shell: bash, zsh or fish")
    ]
    assert [candidate.word for candidate in candidates(["--"])] == ["--help", "--version"]
    assert candidates(["nothing", ""]) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve", "--po"], ["--port="]),
        (["serve", "--nu"], ["--null"]),
        (["serve", "--nonu"], ["--nonull"]),
        (["serve", "--log_f"], ["--log_format="]),
        (["serve", "--log_format", ""], ["human", "json"]),
        (["serve", "--log_format=j"], ["--log_format=json"]),
        (["serve", "--null=t"], ["--null=true"]),
        (["serve", "--port", ""], []),
        (["serve", "--port="], []),
        (["serve", "--set", "server.po"], ["server.port="]),
        (["serve", "--set=server.po"], ["--set=server.port="]),
        (["serve", "--set", "b:server.po"], ["b:server.port="]),
        (["serve", "--set", "c"], ["catalog.", "cache."]),
        (["serve", "--set", "bea"], ["beam.width=", "beam.normalize=", "beam.approximate=", "beam.items_per_id="]),
        (["serve", "--set", "beam.normalize="], ["beam.normalize=valid", "beam.normalize=full"]),
        (["serve", "--set", "b:beam.normalize=f"], ["b:beam.normalize=full"]),
        (["train", "--set", "train.times="], ["train.times=true", "train.times=false"]),
        (["serve", "--set", "server.default_deadline_ms="], ["server.default_deadline_ms=none"]),
        (["serve", "--set", "server.port="], []),
        (["serve", "--set", "server.keys=k"], ["server.keys=keys.json"]),
        (["serve", "--set", "model.path=ru"], ["model.path=runs/"]),
        (["serve", "--set", "no.such="], []),
        (["serve", "--config="], [*(f"--config={name}" for name in named.names()), "--config=a.toml",
                                  "--config=b.py", "--config=keys.json", "--config=my runs/", "--config=runs/",
                                  "--config=two words.yaml"]),
        (["serve", "--config", "a"], ["a.toml"]),
        (["serve", ""], ["my runs/", "runs/"]),
        (["serve", "."], [".hidden/"]),
        (["serve", "runs/"], ["runs/shop/"]),
        (["serve", "no/such/"], []),
        (["serve", "--help=config.se"], ["--help=config.server"]),
        (["config", "--format", ""], ["json", "toml", "yaml"]),
        (["bench", ""], ["ops", "serve"]),
        (["ablate", ""], ["bat", "xgr", "flame", "rcllm", "hlem"]),
        (["ablate", "--li"], ["--list"]),
        (["ablate", "--list", "x"], ["xgr"]),
        (["bench", "--rate", "10", "s"], ["serve"]),
        (["bench", "serve", "r"], ["runs/"]),
        (["completion", "z"], ["zsh"]),
        (["serve", "--", "r"], []),
        (["serve", "--help", "--po"], ["--port="]),
    ],
)  # fmt: skip
def test_what_is_offered(folder: Path, only_flags: None, words: list[str], expected: list[str]) -> None:
    assert [candidate.word for candidate in candidates(words)] == expected


@pytest.fixture
def only_flags() -> None:
    """Flags as `jgr completion` has them."""
    console.define_flags()


def test_every_field_is_offered(only_flags: None) -> None:
    keys = list(field_types(Config))
    assert [c.word for key in keys for c in candidates(["serve", "--set", key]) if c.word == f"{key}="] == [
        f"{key}=" for key in keys
    ]
    (port,) = candidates(["serve", "--set", "server.port"])
    assert port.text == "Port to listen on; 0: any free port."


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_the_help_is_offered(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([command, "--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    shown = {candidate.word.removesuffix("=") for candidate in candidates([command, "-"])}
    assert {flag.partition("=")[0] for flag in listed} <= shown
    assert len(listed) >= 5


def test_the_first_words_are_those_of_the_commands() -> None:
    for command, words in WORDS.items():
        help_ = next(candidate.text for candidate in candidates([""]) if candidate.word == command)
        assert [word for word in words if word not in help_] == []


@pytest.mark.parametrize("words", [["serve", "--set", "server.un"], ["evaluate", "--"], ["c"]])
def test_an_answer_loads_nothing_slow(words: list[str]) -> None:
    code = "import sys; from jgr.cli.main import run; run(sys.argv[1:]); print(*sys.modules)"
    argv = [sys.executable, "-c", code, "completion", "reply", "--", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert len(lines) > 0
    assert SLOW & set(modules.split()) == set()


@pytest.mark.parametrize(
    ("argv", "code", "out"),
    [
        ([], 0, "source <(jgr completion bash)"),
        (["tcsh"], 2, ""),
        (["bash", "x"], 2, ""),
        (["bash"], 0, SCRIPTS["bash"]),
    ],
)
def test_the_command(argv: list[str], code: int, out: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "completion", *argv], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert done.stdout.startswith(out)
    assert done.stdout or done.stderr.count("\n") == 1


BASH_CASES: list[tuple[list[str], list[str]]] = [
    (["jgr", "serve", "--po"], ["--port="]),
    (["jgr", "serve", "--log_format", "="], ["human", "json"]),
    (["jgr", "serve", "--set", "beam.normalize", "=", "f"], ["full"]),
    (["jgr", "serve", "--set", "=", "beam.normalize", "=", "f"], ["full"]),
    (["jgr", "serve", "--set", "b", ":", "server.po"], ["server.port="]),
    (["jgr", "serve", "--set", "=", "b", ":", "beam.normalize", "=", "v"], ["valid"]),
    (["jgr", "serve", "--set", "server.port", "=", "80", "--po"], ["--port="]),
    (["jgr", "serve", "--config", "=", "a"], ["a.toml"]),
    (["jgr", "serve", "--config", "tw"], ["two\\ words.yaml"]),
    (["jgr", "serve", "--config", '"tw'], ["two words.yaml"]),
    (["jgr", "serve", "my\\ r"], ["my\\ runs/"]),
    (["jgr", "serve", "--port", "=", ""], ["my\\ runs/", "runs/"]),
    (["jgr", "nothing", ""], []),
]


def test_bash_completes(folder: Path) -> None:
    """The function that `complete` calls, with the words as readline splits them; the last is the one at the cursor."""
    script = ["set -u", "source <(jgr completion bash)"]
    for words, _ in BASH_CASES:
        script += [
            f"COMP_WORDS=({' '.join(map(shlex.quote, words))})",
            f"COMP_CWORD={len(words) - 1}",
            "_jgr",
            'printf "%s\\n" "${#COMPREPLY[@]}" ${COMPREPLY[@]+"${COMPREPLY[@]}"}',
        ]
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = iter(done.stdout.splitlines())
    found = [(words, [next(lines) for _ in range(int(next(lines)))]) for words, _ in BASH_CASES]
    assert found == BASH_CASES


def test_the_tab_key_completes_in_a_real_bash(folder: Path) -> None:
    """bash with a terminal, which splits the words and puts the answer in place by itself."""
    terminal, inner = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
    )
    os.close(inner)
    try:
        seen = b""

        def until(text: bytes) -> None:
            nonlocal seen
            while text not in seen:
                ready, _, _ = select.select([terminal], [], [], PATIENCE_S)
                assert ready, seen
                seen += os.read(terminal, 4096)
            seen = seen.partition(text)[2]

        os.write(
            terminal,
            b"PS1=; source <(jgr completion bash); bind 'set enable-bracketed-paste off'; echo re'ady'\n",
        )
        until(b"ready")
        for typed, completed in (
            (b"echo jgr; jgr conf\t", b"config "),
            (b"--form\t", b"at="),
            (b"to\t", b"ml "),
            (b"--set server.unk\t", b"nown_items="),
            (b"re\t", b"ject "),
            (b"--set=beam.nor\t", b"malize="),
            (b"fu\t", b"ll "),
        ):
            os.write(terminal, typed)
            until(completed)
        os.write(terminal, b"| grep -A1 unknown_items\n")
        until(b'unknown_items = "reject"')
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


@pytest.mark.parametrize(
    "shell",
    ["bash", pytest.param("zsh", marks=pytest.mark.zsh), pytest.param("fish", marks=pytest.mark.fish)],
)
def test_a_shell_can_parse_its_script(tmp_path: Path, shell: str) -> None:
    path = tmp_path / "script"
    path.write_text(SCRIPTS[shell])
    subprocess.run([shell, "-n", str(path)], check=True, capture_output=True)


@pytest.mark.zsh
def test_zsh_completes(folder: Path) -> None:
    """The function with `compadd` replaced by one that prints, since only its line editor may call that."""
    script = """
        compdef() { }
        compadd() { print -r -- "${(P@)@[-1]}" }
        source <(jgr completion zsh)
        words=(jgr serve --set server.po); CURRENT=4; PREFIX=server.po; _jgr
        words=(jgr serve --set=beam.normalize=); CURRENT=3; PREFIX=--set=beam.normalize=; _jgr
        words=(jgr ''); CURRENT=2; PREFIX=; _jgr
    """
    done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines == [
        "server.port=",
        "--set=beam.normalize=valid --set=beam.normalize=full",
        " ".join(COMMANDS),
    ]


@pytest.mark.fish
def test_fish_completes(folder: Path) -> None:
    for line, expected in (
        ("jgr conf", ["config"]),
        ("jgr serve --set server.po", ["server.port="]),
        ("jgr serve --log_format=", ["--log_format=human", "--log_format=json"]),
        ("jgr serve ", ["my runs/", "runs/"]),
    ):
        code = f"jgr completion fish | source; complete -C {shlex.quote(line)}"
        done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == expected
