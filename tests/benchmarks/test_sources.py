# SPDX-License-Identifier: Apache-2.0
"""What makes a claim stale: a change of code that its benchmark may run, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.sources import IMPORTED, Code, at_commit, checked_out, parsed

ENGINE = "class Engine:\n    def run(self):\n        from jgr.deep import x\n        return x\n"
FAST = "def fast(n):\n    return n + 1\n"
FILES = {
    "benchmarks/speed.py": (
        "import jgr\nfrom jgr.ops import fast\nfrom benchmarks import titles\n"
        "def measure():\n    return jgr.Engine(fast.fast(3))\nif __name__ == '__main__':\n    measure()\n"
    ),
    "benchmarks/served.py": (
        "import subprocess\nNAMES = ['serve', 'configs/shop.py', 'jgr.late']\nsubprocess.run(NAMES)\n"
    ),
    "benchmarks/titles.py": "WORDS = {'speed': 'jgr.unused'}\n",
    "jgr/__init__.py": "_PUBLIC = {'Engine': 'jgr.engine', 'Client': 'jgr.client'}\n",
    "jgr/engine.py": ENGINE,
    "jgr/client.py": "",
    "jgr/deep.py": "x = 1\n",
    "jgr/late.py": "",
    "jgr/unused.py": "",
    "jgr/ops/__init__.py": "",
    "jgr/ops/fast.py": FAST,
    "jgr/cli/main.py": "import jgr.cli.flags\nCOMMANDS = {'serve': 'jgr.cli.serve', 'train': 'jgr.cli.train'}\n",
    "jgr/cli/flags.py": "",
    "jgr/cli/serve.py": "import jgr.client\n",
    "jgr/cli/train.py": "",
    "configs/shop.py": "",
}


def digest(benchmark: str = "benchmarks/speed.py", **changed: str | None) -> str:
    """Of FILES with some of them changed, or taken away; in names / is written __."""
    files: dict[str, str] = dict(FILES)
    for name, text in changed.items():
        path = name.replace("__", "/") + ".py"
        if text is None:
            del files[path]
        else:
            files[path] = text
    return Code(files).digest(benchmark)


def reached(files: dict[str, str], benchmark: str = "benchmarks/speed.py") -> set[str]:
    """The files of which something may run."""
    return {path for path, _ in Code(files).reached(benchmark)}


def test_all_that_is_asked_for_at_any_depth_is_reached() -> None:
    assert reached(FILES) == {
        "benchmarks/speed.py", "jgr/__init__.py", "jgr/engine.py", "jgr/deep.py", "jgr/ops/__init__.py",
        "jgr/ops/fast.py",
    }  # fmt: skip
    assert reached(FILES, "benchmarks/served.py") == {
        "benchmarks/served.py", "configs/shop.py", "jgr/late.py", "jgr/cli/main.py", "jgr/cli/flags.py",
        "jgr/cli/serve.py", "jgr/client.py", "jgr/__init__.py",
    }  # fmt: skip
    assert reached(FILES, "benchmarks/gone.py") == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"jgr__ops__fast": '"""Says more."""\n\n\ndef fast(n):\n    # why\n    return (n + 1)\n'},
        {"jgr__deep": None, "jgr__deeper": "x = 1\n", "jgr__engine": ENGINE.replace("jgr.deep", "jgr.deeper")},
        {"jgr__unused": "y = 2\n", "jgr__client": "z = 1\n", "benchmarks__titles": "WORDS = {}\n"},
        {"jgr__ops__fast": FAST + "def slow(n):\n    return n\n", "jgr__deep": "x = 1\ny = 2\n"},
        {"jgr__ops__fast": "from jgr.ops.moved import fast\n", "jgr__ops__moved": FAST},
        {"jgr__ops__fast": FAST.replace("(n)", "(n: Unused) -> Unused") + "class Unused:\n    pass\n"},
    ],
    ids=["comments", "a moved file", "files that it does not run", "definitions", "a moved definition", "types"],
)  # fmt: skip
def test_what_is_no_change(changed: dict[str, str | None]) -> None:
    assert digest(**changed) == digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"jgr__ops__fast": "def fast(n):\n    return n + 2\n"},
        {"jgr__deep": "x = 2\n"},
        {"benchmarks__speed": FILES["benchmarks/speed.py"] + "import jgr.late\nprint(jgr.late.x)\n"},
        {"jgr__ops__fast": FAST.replace("1", "by()") + "def by():\n    return 1\n"},
        {"jgr__ops__fast": FAST.replace("1", "BY") + "BY = 1\n"},
        {"jgr__ops__fast": FAST + "print(fast)\n"},
        {"jgr__ops__fast": FAST + "@fast\ndef kept():\n    pass\n"},
        {"jgr__ops__fast": f"if True:\n    {FAST.replace(chr(10) + ' ', chr(10) + '     ')}"},
        {"jgr__deep": "import jgr.late\nx = 1\n", "jgr__late": "print(1)\n"},
    ],
    ids=["a function", "a constant", "the benchmark", "what is called", "what is read", "what runs on import",
         "what a decorator keeps", "a condition", "what is imported runs"],
)  # fmt: skip
def test_what_is_a_change(changed: dict[str, str | None]) -> None:
    assert digest(**changed) != digest()


def test_a_module_that_is_handed_on_counts_whole_and_a_package_with_a_dot_too() -> None:
    more = "def slow(n):\n    return n\n"
    for asks in ("print(getattr(fast, name))\n", "__import__('jgr.ops.' + name)\n"):
        files = {**FILES, "benchmarks/speed.py": FILES["benchmarks/speed.py"] + asks}
        changed = {**files, "jgr/ops/fast.py": FAST + more}
        assert Code(changed).digest("benchmarks/speed.py") != Code(files).digest("benchmarks/speed.py")


def test_what_a_file_runs_where_it_is_started_counts_there_alone() -> None:
    guard = "if __name__ == '__main__':\n    print(jgr.late.x)\n"
    other = {**FILES, "benchmarks/other.py": "import jgr.late\nA = 1\n" + guard, "jgr/late.py": "x = 1\n"}
    other["benchmarks/speed.py"] += "from benchmarks.other import A\nprint(A)\n"
    changed = {**other, "jgr/late.py": "x = 2\n"}
    assert Code(changed).digest("benchmarks/speed.py") == Code(other).digest("benchmarks/speed.py")
    assert Code(changed).digest("benchmarks/other.py") != Code(other).digest("benchmarks/other.py")


def test_a_field_of_the_configuration_counts_where_it_is_named() -> None:
    section = (
        "class ServerConfig:\n    port: int = 1\n    host: str = ''\n"
        "    def __post_init__(self):\n        check(self.host)\n"
    )
    reads = "from jgr.config.serving import ServerConfig\nx = ServerConfig().port\n"

    def of(section: str, reads: str = reads) -> str:
        files = {**FILES, "jgr/config/serving.py": section, "jgr/engine.py": reads}
        return Code(files).digest("benchmarks/speed.py")

    other = section.replace("= ''", "= 'a'")
    before = of(section)
    assert of(other) == of(section + "    more: int = 0\n") == before
    assert of(section.replace("self.host", "self.port")) == of(section, '"""The host."""\n' + reads) == before
    assert of(section.replace("port: int = 1", "port: int = 2")) != before
    assert of(section + "    def also(self):\n        pass\n") != before
    for named in (
        "print(replace(config, host='b'))\n",
        "print(override(config, 'server.host=b'))\n",
        "print(x.host)\n",
    ):
        assert of(other, reads + named) != of(section, reads + named)


def test_what_puts_the_machine_into_words_does_not_count() -> None:
    path = "jgr/evaluation/machine.py"
    machine = "def machine():\n    return 1\ndef is_quiet():\n    return True\n"
    asks = "from jgr.evaluation.machine import machine, is_quiet\nmachine(), is_quiet()\n"

    def of(text: str) -> str:
        return Code({"benchmarks/speed.py": asks, path: text}).digest("benchmarks/speed.py")

    assert (
        of(machine) == of(machine.replace("1", "2")) == of(machine.replace("return 1", "return is_quiet()"))
    )
    assert of(machine) != of(machine.replace("True", "False"))


def test_a_command_is_run_only_where_processes_are_started() -> None:
    quiet = {"benchmarks__served": FILES["benchmarks/served.py"].replace("import subprocess", "import os")}
    assert digest("benchmarks/served.py", jgr__cli__serve="x = 3\n") != digest("benchmarks/served.py")
    changed = digest("benchmarks/served.py", jgr__cli__serve="x = 3\n", **quiet)
    assert changed == digest("benchmarks/served.py", **quiet)


def test_the_files_of_a_commit_are_those_that_git_has(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--no-verify", "--message=first")
    (tmp_path / "jgr/deep.py").write_text("x = 2\n")
    then = at_commit(git("rev-parse", "HEAD"), tmp_path)
    assert then.digest("benchmarks/speed.py") == digest()
    assert checked_out(tmp_path).digest("benchmarks/speed.py") == digest(jgr__deep="x = 2\n")
    with pytest.raises(subprocess.CalledProcessError):
        at_commit("0" * 40, tmp_path)


def test_the_digest_does_not_depend_on_the_version_of_python() -> None:
    text = "@d\ndef f(a, *b: int, c=None, **e) -> str:\n    return f'{a!r:>{c}}' + 'x' * (1 if b else 2.5)\n"
    assert parsed(text).parts["f"].digest.startswith("f80f3999f67fdac3")  # what 3.11, 3.12 and 3.13 give


def test_a_file_taken_apart() -> None:
    found = parsed(
        "'''Says what it is.'''\nimport a.b as c\nfrom d import e\nif TYPE_CHECKING:\n    import g\n"
        "T = {'k': 'v'}\nc.f.g(T)[0].h(w=1)\n@e\ndef p(q: int):\n    import r.s\n    return r.s.t\n"
    )
    rest = found.parts[IMPORTED]
    assert set(found.parts) == {IMPORTED, "T", "p"} and found.where == {"T": "T", "p": "p"}
    assert rest.uses == {("c", "f", "g"), ("T",)} and rest.words == {"f", "g", "h", "w"}
    assert rest.imports == {"a.b", "d", "d.e"} and found.parts["p"].imports == {"r.s"}
    assert found.parts["p"].uses == {("e",), ("r", "s", "t")}
    assert found.bound == {
        "c": {("a.b", "")}, "e": {("d", "e")}, "g": {("g", "")}, "r": {("r", "")},
    }  # fmt: skip
    assert found.later == {"k": "v"}
