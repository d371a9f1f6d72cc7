# SPDX-License-Identifier: Apache-2.0
"""The config tree: overrides are typed by their field, mistakes are named, files are read as they stand."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr import fields
from jgr.config import (
    BeamConfig,
    Config,
    ConfigError,
    TrainConfig,
    UserError,
    load_config,
    named,
    override,
    to_json,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("assignment", "section", "field", "value"),
    [
        ("beam.width=256", "beam", "width", 256),
        ("beam.normalize=full", "beam", "normalize", "full"),
        ("batching.max_wait_ms=2", "batching", "max_wait_ms", 2.0),
        ("train.learning_rate=3e-4", "train", "learning_rate", 3e-4),
        ("model.path=/a b=c", "model", "path", "/a b=c"),
        ("model.path=", "model", "path", ""),
        ("profiles.tokens=64,128", "profiles", "tokens", (64, 128)),
        ("profiles.tokens=(64, 128)", "profiles", "tokens", (64, 128)),
        ("profiles.batch=4", "profiles", "batch", (4,)),
        ("profiles.batch=(4,)", "profiles", "batch", (4,)),
        ("server.default_deadline_ms=50", "server", "default_deadline_ms", 50.0),
        ("server.default_deadline_ms=None", "server", "default_deadline_ms", None),
        (" beam.width = 7 ", "beam", "width", 7),
    ],
)
def test_override_types_the_value_by_its_field(assignment: str, section: str, field: str, value: Any) -> None:
    before = Config()
    after = override(before, assignment)
    got = getattr(getattr(after, section), field)
    assert got == value
    assert type(got) is type(value)
    changed = dataclasses.replace(getattr(before, section), **{field: value})
    assert after == dataclasses.replace(before, **{section: changed})


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("beam.widht=3", "no field 'beam.widht' in the configuration; the nearest is 'beam.width'"),
        ("width=3", "the nearest is 'beam.width'"),
        ("rank.scorer=item_token", "no field 'rank.scorer' any more; it is called 'rank.method' now"),
        ("sever.port=1", "the nearest is 'server.port'"),
        ("beam.width.x=3", "the nearest is 'beam.width'"),
        ("=3", "there is no field ''"),
        ("beam.width", "write section.field=value"),
        ("beam.width=3.5", "beam.width must be an integer, not '3.5'"),
        ("beam.width=", "beam.width must be an integer, not ''"),
        ("beam.width=0", "beam.width must be at least 1, not 0"),
        ("data_parallel.devices=0", "data_parallel.devices must be at least 1, not 0"),
        ("beam.normalize=best", "beam.normalize must be one of valid, full, not 'best'"),
        ("profiles.tokens=", "profiles.tokens must be ascending sizes such as (1, 8), not ()"),
        ("profiles.tokens=8,x", "profiles.tokens must be integers such as (1, 8), not '8,x'"),
        ("profiles.tokens=8,8", "profiles.tokens must be ascending sizes"),
        ("profiles.tokens=0,8", "profiles.tokens must be ascending sizes"),
        ("batching.max_wait_ms=nan", "batching.max_wait_ms must be a finite number"),
        ("batching.max_wait_ms=inf", "batching.max_wait_ms must be a finite number"),
        ("cache.device_mb=1e308", "cache.device_mb must be between -1e+15 and 1e+15"),
        ("cache.share=1e308", "cache.share must be between -1e+15 and 1e+15"),
        (f"cache.page_kb={10**400}", "cache.page_kb must be between -1e+15 and 1e+15"),
        ("server.port=65536", "server.port must be at most 65535"),
        ("server.drain_timeout_s=1e14", "server.drain_timeout_s must be at most 1e6"),
        ("executors.number=99999999999999", "executors.number must be at most 1024"),
        ("server.host=", "server.host must not be empty"),
        ("server.default_deadline_ms=0", "server.default_deadline_ms must be above 0 or none"),
        ("server.default_deadline_ms=soon", "must be a finite number or none, not 'soon'"),
        ("prompt.template=<bos>", "prompt.template must hold {history} exactly once"),
        ("model.name=", "model.name must not be empty"),
        ("train.kv_heads=3", "train.heads (4) must be a multiple of train.kv_heads (3)"),
        ("train.head_dim=5", "train.head_dim must be even"),
        ("train.dropout=1", "train.dropout must be below 1"),
        ("train.learn_valid=true", "train.learn_valid: train.model=generator is no retriever"),
        ("train.retriever=runs/hstu", "train.retriever: train.model=generator is no ranker"),
        ("train.lookups=0.5", "train.lookups: train.model=generator is no ranker"),
        ("train.layouts=causal", "train.layouts: train.model=generator is no ranker"),
        ("train.compute=bfloat16", "train.compute: train.model=generator is no ranker"),
        ("train.temperature=0.05", "train.temperature: only of a retriever, or with train.cosines"),
    ],
)
def test_a_bad_override_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        override(Config(), assignment)
    assert message in str(e.value)
    assert isinstance(e.value, UserError)


def test_what_a_model_would_not_read_is_refused() -> None:
    def refused(model: str, assignment: str) -> bool:
        try:
            override(Config(), f"train.model={model}", assignment)
        except ConfigError as error:
            assert str(error).startswith(assignment.partition("=")[0])
            return True
        return False

    models = get_args(get_type_hints(TrainConfig)["model"])
    assert {model for model in models if refused(model, "train.skip_events=0.3")} == {
        "climber", "stu", "controller"
    }  # fmt: skip
    taken = {model for model in models if not refused(model, "train.temperature=0.05")}
    assert taken == {"sasrec", "lrurec", "hstu"}
    for model in models:  # what changes nothing may be said
        override(Config(), f"train.model={model}", "train.temperature=1", "train.skip_events=0")
    cosines = override(Config(), "train.temperature=0.05", "train.cosines=true").train
    assert (cosines.temperature, cosines.model) == (0.05, "generator")


def test_overrides_apply_together_and_the_last_wins() -> None:
    with pytest.raises(ConfigError):
        override(Config(), "train.heads=3")
    train = override(Config(), "train.heads=3", "train.kv_heads=3", "train.heads=6").train
    assert (train.heads, train.kv_heads) == (6, 3)


@given(st.integers(1, 10**12), st.lists(st.integers(1, 10**9), min_size=1, unique=True), st.floats(0, 60_000))
def test_override_reads_back_what_was_written(width: int, sizes: list[int], wait: float) -> None:
    tokens = tuple(sorted(sizes))
    config = override(
        Config(), f"beam.width={width}", f"profiles.tokens={tokens}", f"batching.max_wait_ms={wait}"
    )
    assert config.beam.width == width
    assert config.profiles.tokens == tokens
    assert config.batching.max_wait_ms == wait


@given(st.text())
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    for key in ("beam.width", "profiles.tokens", "server.default_deadline_ms", "beam.normalize", text):
        try:
            override(Config(), f"{key}={text}")
        except ConfigError as e:
            assert str(e)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [(bool, "true", True), (bool, "false", False), (Literal["a", "b"], "b", "b"), (int | None, "none", None)],
)
def test_every_kind_of_annotation_can_be_read(hint: Any, text: str, value: Any) -> None:
    assert fields.parse(text, hint) is value
    with pytest.raises(ValueError, match="maybe"):
        fields.parse("maybe", hint)


def test_a_tuple_is_read_with_spaces_and_may_be_empty() -> None:
    names, numbers = tuple[str, ...], tuple[float, ...]
    assert fields.parse("(a, b)", names) == fields.parse(" a ,b", names) == ("a", "b")
    assert fields.parse("(1, 0.5)", numbers) == (1.0, 0.5)
    assert fields.parse("", numbers) == fields.parse("()", numbers) == fields.parse("()", names) == ()
    assert fields.parse("", names) == ("",)
    assert fields.parse(",a", names) == ("", "a")
    assert override(Config(), "feedback.weights=").feedback.weights == ()


@pytest.mark.parametrize("value", ["32", 32.0, True, None])
def test_a_value_of_another_type_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"beam\.width must be an integer, not "):
        BeamConfig(width=value)
    with pytest.raises(ConfigError, match="beam must be a BeamConfig, not "):
        Config(beam=value)


def test_json_is_complete_and_hides_the_api_key() -> None:
    shown = to_json(override(Config(), "server.api_key=hunter2", "profiles.tokens=8,16"))
    assert json.loads(json.dumps(shown)) == shown
    assert shown["profiles"]["tokens"] == [8, 16]
    assert shown["server"]["api_key"] == "***"
    assert shown["server"]["default_deadline_ms"] is None
    assert to_json(Config())["server"]["api_key"] == ""
    assert "hunter2" not in repr(override(Config(), "server.api_key=hunter2"))
    assert {s: set(values) for s, values in shown.items()} == {
        s.name: {f.name for f in dataclasses.fields(getattr(Config(), s.name))}
        for s in dataclasses.fields(Config)
    }


def _write(path: Path, body: str) -> Path:
    path.write_text(f"from jgr.config import *\n{body}")
    return path


def test_load_config_reads_the_file_as_it_stands(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.py", "def get_config():\n    return Config(beam=BeamConfig(width=7))\n")
    assert load_config(path) == Config(beam=BeamConfig(width=7))
    _write(path, "def get_config():\n    return Config(beam=BeamConfig(width=8))\n")
    assert load_config(path).beam.width == 8
    assert [p.name for p in tmp_path.iterdir()] == ["x.py"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\n", ": define get_config() so that it returns a jgr.config.Config"),
        ("get_config = 1\n", ": define get_config() so that it returns"),
        ("def get_config():\n    return {}\n", ": define get_config() so that it returns"),
        ("\ndef get_config(:\n", ", line 3: SyntaxError: "),
        ("import no_such_module\n", ", line 2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def get_config():\n    return Config(bean=1)\n", ", line 3: TypeError: "),
        ("def get_config():\n    return Config(beam=BeamConfig(0))\n", ", line 3: beam.width must be "),
        (
            "def get_config():\n    return Config(rank=RankConfig(scorer='item_token'))\n",
            ", line 3: TypeError: RankConfig.__init__() got an unexpected keyword argument 'scorer'; "
            "the field is called rank.method now",
        ),
        ("def get_config():\n    return {}['x']\n", ", line 3: KeyError: 'x'"),
    ],
)
def test_a_bad_config_file_is_named_with_its_line(tmp_path: Path, body: str, message: str) -> None:
    path = _write(tmp_path / "x.py", body)
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert str(e.value).startswith(f"{path}{message}")


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "x.py")
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path)


def test_a_name_is_a_configuration_that_comes_with_jgr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = sorted((ROOT / "configs").glob("[!_]*.py"))
    assert named.names() == [path.stem for path in files]
    for path in files:
        assert load_config(path.stem) == load_config(path)
        assert named.summary(path.stem) in path.read_text()
    other = _write(
        tmp_path / "industrial", "def get_config():\n    return Config(beam=BeamConfig(width=7))\n"
    )
    assert load_config("industrial") == load_config(ROOT / "configs" / "industrial.py")
    assert load_config(other).beam.width == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("industral", "there is no configuration 'industral'; the nearest are industrial, "),
        ("", "there is no configuration ''; the nearest are "),
        (
            "configs/ml1m.py",
            "configs/ml1m.py: there is no such config file; jgr has one of its own that is called ml1m",
        ),
        ("mine.py", "mine.py: there is no such config file"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as e:
        load_config(given)
    assert str(e.value).startswith(message)
    assert "\n" not in str(e.value)


def test_a_config_file_that_exits_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"config\.py, line 2: SystemExit: 0"):
        load_config(path)


def test_a_config_file_may_define_dataclasses(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from jgr.config import Config\n"
        "@dataclass\n"
        "class Mine:\n"
        "    size: int = 1\n"
        "def get_config() -> Config:\n"
        "    return Config()\n"
    )
    assert load_config(path) == Config()
