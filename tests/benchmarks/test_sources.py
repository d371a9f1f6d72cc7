# SPDX-License-Identifier: Apache-2.0
"""What makes a claim stale: a change of code that its benchmark may run, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.sources import Code, at_commit, checked_out, parsed

FILES = {
    "benchmarks/speed.py": "import jgr\nfrom jgr.ops import fast\nfrom benchmarks import titles\njgr.Engine()\n",
    "benchmarks/served.py": "import subprocess\nNAMES = ['serve', 'configs/shop.py', 'jgr.late']\n",
    "benchmarks/titles.py": "WORDS = {'speed': 'jgr.unused'}\n",
    "jgr/__init__.py": "_PUBLIC = {'Engine': 'jgr.engine', 'Client': 'jgr.client'}\n",
    "jgr/engine.py": "def run():\n    from jgr.deep import x\n",
    "jgr/client.py": "",
    "jgr/deep.py": "x = 1\n",
    "jgr/late.py": "",
    "jgr/unused.py": "",
    "jgr/ops/__init__.py": "",
    "jgr/ops/fast.py": "def fast(n):\n    return n + 1\n",
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


def test_all_that_is_imported_at_any_depth_is_reached() -> None:
    assert Code(FILES).reached("benchmarks/speed.py") == {
        "benchmarks/speed.py", "jgr/__init__.py", "jgr/engine.py", "jgr/deep.py", "jgr/ops/__init__.py",
        "jgr/ops/fast.py",
    }  # fmt: skip
    assert Code(FILES).reached("benchmarks/served.py") == {
        "benchmarks/served.py", "configs/shop.py", "jgr/late.py", "jgr/cli/main.py", "jgr/cli/flags.py",
        "jgr/cli/serve.py", "jgr/client.py",
    }  # fmt: skip
    assert Code(FILES).reached("benchmarks/gone.py") == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"jgr__ops__fast": '"""Says more."""\n\n\ndef fast(n):\n    # why\n    return (n + 1)\n'},
        {"jgr__deep": None, "jgr__deeper": "x = 1\n", "jgr__engine": "def run():\n    from jgr.deeper import x\n"},
        {"jgr__unused": "y = 2\n", "jgr__client": "z = 1\n", "benchmarks__titles": "WORDS = {}\n"},
    ],
    ids=["comments", "a moved file", "files that it does not run"],
)  # fmt: skip
def test_what_is_no_change(changed: dict[str, str | None]) -> None:
    assert digest(**changed) == digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"jgr__ops__fast": "def fast(n):\n    return n + 2\n"},
        {"jgr__deep": "x = 2\n"},
        {"benchmarks__speed": FILES["benchmarks/speed.py"] + "import jgr.late\njgr.late.x\n"},
    ],
)
def test_what_is_a_change(changed: dict[str, str | None]) -> None:
    assert digest(**changed) != digest()


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
        "y = replace(config, host='b')\n",
        "y = override(config, 'server.host=b')\n",
        "y = x.host\n",
    ):
        assert of(other, reads + named) != of(section, reads + named)


def test_what_puts_the_machine_into_words_does_not_count() -> None:
    path = "jgr/evaluation/machine.py"
    machine = "def machine():\n    return 1\n"

    def of(text: str) -> str:
        return Code({"benchmarks/speed.py": "import jgr.evaluation.machine\n", path: text}).digest(
            "benchmarks/speed.py"
        )

    assert of(machine) == of("def machine():\n    return 2\n") == of("")
    assert of(machine) != of(machine + "def is_quiet():\n    return True\n")


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
    assert parsed(text).digest.startswith("71dac3938e106f52")  # what 3.11, 3.12 and 3.13 give


def test_a_text_that_is_no_module_is_no_import() -> None:
    found = parsed("'''Says what it is.'''\nimport a.b as c\nfrom d import e\nc.f({'k': 'v'})\n")
    assert {"a.b", "d", "d.e", "c.f"} == found.imports
    assert found.pairs == (("k", "v"),)
