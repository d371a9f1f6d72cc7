# SPDX-License-Identifier: Apache-2.0
"""Fields from environment variables and from the files that they name, and where keys are not to be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jgr.config import Config, ConfigError, override
from jgr.config.environment import MAX_BYTES, OF_FILE, assignments, variable
from jgr.config.tree import field_types, secret_fields

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
KEY = "hunter2-secret-key"
PATIENCE_S = 60.0


def given(**environ: str) -> Config:
    return override(Config(), *assignments(environ, Config).values())


def jgr(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run(
        [sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False, env=env
    )


def test_every_field_has_one_variable_of_its_own() -> None:
    names = [variable(key) + end for key in field_types(Config) for end in ("", OF_FILE)]
    assert len(set(names)) == len(names)
    assert variable("server.api_key") == "JGR_SERVER__API_KEY"


def test_values_are_typed_by_their_field() -> None:
    found = given(
        JGR_SERVER__PORT="8001", JGR_PROFILES__TOKENS="8,16", JGR_SERVER__DEFAULT_DEADLINE_MS="none",
        JGR_MODEL__PATH="a=b", JGR_TRAIN__TIMES="false", JGR_DATA="/x", JGR_SERVICE_HOST="10.0.0.1", PATH="/bin",
    )  # fmt: skip
    assert found == override(Config(), "server.port=8001", "profiles.tokens=8,16", "model.path=a=b")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_holds_the_value_without_its_line_end(tmp_path: Path, end: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(f"{KEY} {end}".encode())
    assert given(JGR_SERVER__API_KEY_FILE=str(path)).server.api_key == f"{KEY} "
    path.write_bytes(f"8001{end}".encode())
    assert given(JGR_SERVER__PORT_FILE=str(path)).server.port == 8001


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JGR_SERVER__PROT": "1"}, "JGR_SERVER__PROT is no field of the configuration; the nearest is JGR_SERVER__P"),
        ({"JGR_SERVER__APIKEY": KEY}, "the nearest is JGR_SERVER__API_KEY"),
        ({"JGR_SERVER__APIKEY_FILE": KEY}, "JGR_SERVER__APIKEY_FILE is no field"),
        ({"JGR_server__port": "1"}, "the nearest is JGR_"),
        ({"JGR___": "1"}, "JGR___ is no field"),
        ({"JGR_RANK__SCORER": "x"}, "no variable JGR_RANK__SCORER any more; it is called JGR_RANK__METHOD now"),
        ({"JGR_SERVER__PORT": "x"}, "JGR_SERVER__PORT must be an integer, not 'x'"),
        ({"JGR_SERVER__PORT": ""}, "JGR_SERVER__PORT must be an integer, not ''"),
        ({"JGR_SERVER__API_KEY": ""}, "JGR_SERVER__API_KEY: it is empty, where a secret should stand"),
        ({"JGR_SERVER__API_KEY": f"{KEY}\nx"}, "JGR_SERVER__API_KEY: a secret must be one line"),
        ({"JGR_SERVER__API_KEY": KEY, "JGR_SERVER__API_KEY_FILE": "x"}, "both give server.api_key: leave out one"),
        ({"JGR_SERVER__API_KEY_FILE": "/no/such"}, "JGR_SERVER__API_KEY_FILE: /no/such: cannot be read"),
        ({"JGR_SERVER__API_KEY_FILE": ""}, "JGR_SERVER__API_KEY_FILE: "),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_its_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        assignments(environ, Config)
    assert message in str(e.value)
    assert KEY not in str(e.value)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\xff" + KEY.encode(), f"{KEY}\n{KEY}\n".encode(), b"x" * (MAX_BYTES + 1)]
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="JGR_SERVER__API_KEY_FILE: ") as e:
        assignments({"JGR_SERVER__API_KEY_FILE": str(path)}, Config)
    assert KEY not in str(e.value)


def test_a_later_source_wins(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("[server]\nport = 1\nmax_history = 1\nmax_candidates = 1\n")
    environ = {"JGR_SERVER__PORT": "2", "JGR_SERVER__MAX_HISTORY": "2"}
    done = jgr("config", f"--config={path}", "--set=server.port=3", **environ)
    server = json.loads(done.stdout)["server"]
    found = tuple(server[name] for name in ("port", "max_history", "max_candidates", "max_connections"))
    assert found == (3, 2, 1, Config().server.max_connections)


def test_sources_are_checked_together_and_an_error_names_the_variable() -> None:
    done = jgr("config", "--set=train.kv_heads=3", JGR_TRAIN__HEADS="3")
    assert (done.returncode, json.loads(done.stdout)["train"]["heads"]) == (0, 3)
    done = jgr("config", JGR_SERVER__PORT="70000")
    assert (done.returncode, done.stdout) == (2, "")
    said = "server.port must be at most 65535, not 70000 (the environment sets JGR_SERVER__PORT)"
    assert done.stderr == f"jgr: {said}\n"


@pytest.mark.parametrize("by_file", [True, False])
def test_a_key_of_the_environment_opens_the_server_and_is_seen_nowhere(tmp_path: Path, by_file: bool) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    env = {"JGR_SERVER__API_KEY_FILE": str(path)} if by_file else {"JGR_SERVER__API_KEY": KEY}
    for format in ("json", "toml", "yaml"):
        done = jgr("config", f"--format={format}", **env)
        assert done.returncode == 0
        assert KEY not in done.stdout + done.stderr
        assert "***" in done.stdout
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "serve", "--null", "--port=0", "--log_level=debug"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env},
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            command_line = Path(f"/proc/{child.pid}/cmdline").read_bytes()  # what ps shows
            assert b"serve" in command_line
            assert KEY.encode() not in command_line
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S)
            refused.value.close()
            request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                assert reply.status == 200
                assert KEY not in reply.read().decode()
        finally:
            child.terminate()
            rest, log = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0
    assert KEY not in rest + log


def test_a_section_with_a_wrong_secret_shows_none_of_it() -> None:
    same = {"JGR_SERVER__API_KEY": KEY, "JGR_SERVER__ADMIN_KEY": KEY}
    done = jgr("config", **same)
    assert done.returncode == 2
    assert "server.admin_key must not be server.api_key" in done.stderr
    assert KEY not in done.stderr
    assert secret_fields(Config) >= {"server.api_key", "server.admin_key"}
