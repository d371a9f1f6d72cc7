# SPDX-License-Identifier: Apache-2.0
"""`jgr serve`: which configuration is whose, and a server of two models as a process."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from jgr.config import BeamConfig, Config, ConfigError, ModelConfig, PromptConfig, ServerConfig, to_json
from jgr.models.manifest import warn_of_prompt
from jgr.serving.versions.sources import configurations

PATIENCE_S = 60.0
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def write(folder: Path, name: str, server: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(
        "from jgr.config import *\n"
        f"def get_config(): return Config(model=ModelConfig(name={name!r}), server=ServerConfig({server}))\n"
    )
    return str(path)


def test_without_a_file_there_is_one_model_with_the_defaults() -> None:
    assert configurations([], []) == [Config()]
    (config,) = configurations([], ["beam.width=8", "jgr:beam.width=9"])
    assert config == Config(beam=BeamConfig(width=9))


def test_an_override_is_for_all_models_or_for_the_one_it_names(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a"), write(tmp_path, "b")]
    texts = [
        "model.dtype=bfloat16",
        "b:beam.width=8",
        "b:model.name=c",
        "a:model.path=x:y=z",
        "server.port=1",
    ]
    assert configurations(paths, texts) == [
        Config(model=ModelConfig("a", "x:y=z", "bfloat16"), server=ServerConfig(port=1)),
        Config(
            model=ModelConfig("c", dtype="bfloat16"), beam=BeamConfig(width=8), server=ServerConfig(port=1)
        ),
    ]


def test_the_server_is_that_of_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write(tmp_path, "a", "port=1"), write(tmp_path, "b", "port=2"), write(tmp_path, "c")]
    configs = configurations(paths, ["server.max_history=9"])
    assert {config.server for config in configs} == {ServerConfig(port=1, max_history=9)}
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "model b: its section server is not used, the first's is"
    ]
    with pytest.raises(ConfigError, match=r"--set b:server\.port: .* the first model, a$"):
        configurations(paths, ["b:server.port=3"])


def test_what_cannot_be_told_apart_or_found_is_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path, "a"), write(tmp_path, "b")
    with pytest.raises(ConfigError, match=r"model\.name: there are two of 'a'"):
        configurations([one, one], [])
    with pytest.raises(ConfigError, match=r"model\.name: there are two of 'a'"):
        configurations([one, other], ["b:model.name=a"])
    with pytest.raises(ConfigError, match=r"--set c:beam\.width: .*'c'; there are a, b"):
        configurations([one, other], ["c:beam.width=8"])
    with pytest.raises(ConfigError, match=r"the nearest is 'beam\.width'"):
        configurations([one, other], ["b:beam.widht=8"])


def test_a_model_that_is_not_there_is_told_before_another_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")  # whoever loads it says that it is none
    (tmp_path / "own.toml").write_text('[model]\nname = "own"\npath = "runs/none"\n')
    command = [sys.executable, "-c", RUN, "serve", ".", "--config=own.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    words = "no such model folder (model.path); a model of the Hugging Face hub is named hf://runs/none"
    assert (done.returncode, done.stderr) == (2, f"jgr: model 'own': runs/none: {words}\n")


def test_a_file_without_a_model_is_refused_at_once_and_told_how_to_go_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[server]\nport = 1\n")
    command = [sys.executable, "-c", RUN, "serve", ".", "--config=own.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "jgr: own.toml: model.path is not set, and each --config is a model of its own: jgr config . --format=toml "
        "writes one file of both, or give single fields by --set"
    )


def test_a_file_that_takes_the_place_of_a_folders_prompt_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learnt = Config(model=ModelConfig(path=str(tmp_path)), prompt=PromptConfig(template="Of {history}: "))
    warn_of_prompt(Config(model=ModelConfig(path=str(tmp_path))), "own.toml")  # there is no serving.json
    settings = to_json(learnt) | {"model": {"name": "jgr"}}
    settings = {name: settings[name] for name in ("model", "prompt")}
    manifest = {"settings": settings, "catalog": {"version": "1"}, "schema": 1}
    (tmp_path / "serving.json").write_text(json.dumps(manifest))
    warn_of_prompt(learnt, "own.toml")
    assert caplog.messages == []
    warn_of_prompt(Config(model=ModelConfig(path=str(tmp_path))), "own.toml")
    assert caplog.messages == [
        f"own.toml: prompt.template: not what {tmp_path}/serving.json says, which a file takes the place of; "
        f"jgr config {tmp_path} prints that"
    ]


def test_two_models_are_served_by_one_process(tmp_path: Path) -> None:
    configs = [f"--config={write(tmp_path, name)}" for name in ("a", "b")]
    command = [sys.executable, "-c", RUN, "serve", "--null", "--port=0", "--set=b:beam.width=16", *configs]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as reply:
                models = json.load(reply)["data"]
            assert [(model["id"], model["beam_width"]) for model in models] == [("a", 32), ("b", 16)]
            child.send_signal(signal.SIGTERM)
            assert child.wait(PATIENCE_S) == 0
        finally:
            child.kill()


def test_an_error_names_the_model_and_other_commands_take_one_file(tmp_path: Path) -> None:
    configs = [f"--config={write(tmp_path, name)}" for name in ("a", "b")]
    for argv, words in (
        (["serve", *configs, f"--set=model.path={tmp_path / 'none'}"], "jgr: model 'a': "),
        (["config", *configs], "jgr: --config may be given once"),
    ):
        done = subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(words), done.stderr
