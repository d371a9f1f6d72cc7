# SPDX-License-Identifier: Apache-2.0
"""Configurations as TOML, JSON and YAML: what is written reads back, and a mistake is named with its line."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jgr.config import (
    BeamConfig,
    Config,
    ConfigError,
    ServerConfig,
    from_json,
    load_config,
    override,
    to_json,
)
from jgr.config.formats import FORMATS, MAX_BYTES, dump
from jgr.config.tree import field_types, secret_fields

HINTS = field_types(Config)
OPEN = sorted(HINTS.keys() - secret_fields(Config))
READERS: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
"""Others' readers: what jgr writes must mean the same to them."""


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation, of which a field may exclude some."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return st.sampled_from(options)
    if get_origin(hint) is tuple:
        items = st.lists(values(options[0]), max_size=4, unique=True).map(lambda found: tuple(sorted(found)))
        return items
    if type(None) in options:
        return st.none() | values(options[0])
    numbers = st.integers(0, 10**12) | st.integers(0, 64)
    floats = st.floats(0, 1e14) | st.floats(0, 1) | numbers
    words = st.sampled_from(
        ["", "no", "yes", "null", "~", "1e3", "010", " a ", "none", "- x", "#", "{history}", "é\n"]
    )
    texts = words | st.text(st.characters(exclude_categories=["Cs"]))
    return {str: texts, int: numbers, float: floats, bool: st.booleans()}[hint]


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A configuration with some fields changed; what a section's check excludes stays as it was."""
    config = Config()
    for key in draw(st.lists(st.sampled_from(OPEN), max_size=12, unique=True)):
        section, name = key.split(".")
        changed = {name: draw(values(HINTS[key]))}
        try:
            part = dataclasses.replace(getattr(config, section), **changed)
        except ConfigError:
            continue
        config = dataclasses.replace(config, **{section: part})
    return config


@given(configs(), st.sampled_from(FORMATS))
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, config: Config, format: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"config.{format}"
    text = dump(config, format)
    assert text.isascii()
    path.write_text(text)
    read = load_config(path)
    assert read == config
    assert to_json(read) == to_json(config)


@given(configs(), st.sampled_from(FORMATS))
def test_other_readers_understand_it(config: Config, format: str) -> None:
    shown = to_json(config)
    if format == "toml":  # which has no null
        shown = {s: {f: "none" if v is None else v for f, v in values.items()} for s, values in shown.items()}
    assert READERS[format](dump(config, format)) == shown


def test_the_strategy_reaches_every_field() -> None:
    for key in OPEN:
        assert values(HINTS[key]) is not None
    assert secret_fields(Config) == {
        "server.api_key",
        "server.admin_key",
        "features.store",
        "embeddings.remote",
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_secret_is_redacted_and_its_mark_refused(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"config.{format}"
    path.write_text(
        dump(override(Config(), "server.api_key=hunter2", "features.store=redis://:pw@h"), format)
    )
    assert "hunter2" not in path.read_text()
    assert "pw" not in path.read_text()
    with pytest.raises(ConfigError, match=r"features\.store: \*\*\* is printed in place of a secret"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"server\.api_key: \*\*\* is printed in place of a secret"):
        override(Config(), "server.api_key=***")
    with pytest.raises(ConfigError, match=r"server\.admin_key: \*\*\*"):
        ServerConfig(admin_key="***")


SERVER = {
    "x.toml": "[server]\nport = 1\nhost = 'h'\n[profiles]\ntokens = [8, 16]\n[cache]\nitem_share = 'none'\n",
    "x.json": '{"server": {"port": 1, "host": "h"}, "profiles": {"tokens": [8, 16]}, "cache": {"item_share": null}}',
    "x.yaml": "server:\n  port: 1\n  host: h\nprofiles:\n  tokens: [8, 16]\ncache:\n  item_share: none\n",
    "x.YML": "server: {port: 1, host: 'h'}\nprofiles: {tokens: [8, 16]}\ncache: {item_share: ~}\nbeam:\n",
}


@pytest.mark.parametrize("name", SERVER)
def test_the_same_file_in_each_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\ufeff" * (name == "x.toml") + SERVER[name])
    assert load_config(path) == override(Config(), "server.port=1", "server.host=h", "profiles.tokens=8,16")


@pytest.mark.parametrize("name", ["x.toml", "x.json", "x.yaml"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}" if name == "x.json" else "")
    assert load_config(tmp_path / name) == Config()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("beam: {width: 7}", Config(beam=BeamConfig(width=7))),
        ("server: {host: no}", Config(server=ServerConfig(host="no"))),
        ("server: {host: 1e3}", Config(server=ServerConfig(host="1e3"))),
        ("server: {api_key: 01234567}", Config(server=ServerConfig(api_key="01234567"))),
        ("server: {host: 2026-11-23}", Config(server=ServerConfig(host="2026-11-23"))),
        ("server: {patience_ms: 1e3}", Config(server=ServerConfig(patience_ms=1000.0))),
        ("server: {default_deadline_ms: 5e1}", Config(server=ServerConfig(default_deadline_ms=50.0))),
        ("train: {times: True, model: hstu}", override(Config(), "train.times=true", "train.model=hstu")),
        ("cache: {policy: none}", Config()),
        ("x: &x [1, 2]\nprofiles: {batch: *x}", None),
    ],
)
def test_yaml_values_are_read_as_their_field_needs_them(
    tmp_path: Path, value: str, expected: Config | None
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(value)
    if expected is None:
        with pytest.raises(ConfigError, match="no section 'x'"):
            load_config(path)
    else:
        assert load_config(path) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "[server]\n\n# widht\nport = 1\nprot = 2\n", ", line 5: there is no field 'server.prot' in the "),
        ("x.toml", "[server]\n'prot' = 2\n", "the nearest is 'server.port'"),
        ("x.toml", "[beam]\nwidth = [\n1,\n2]\n", ", line 2: beam.width must be an integer, not (1, 2)"),
        ("x.toml", 'beam.width = "7"\n', ", line 1: beam.width must be an integer, not '7'"),
        ("x.toml", "[beam]\nwidth = 7.0\n", ", line 2: beam.width must be an integer, not 7.0"),
        ("x.toml", "[beam]\nwidth = true\n", ", line 2: beam.width must be an integer, not True"),
        ("x.toml", "[model]\nname = 2026-11-23\n", ", line 2: model.name must be text, not datetime.date"),
        ("x.toml", "[batching]\nmax_wait_ms = nan\n", ", line 2: batching.max_wait_ms must be a finite number"),
        ("x.toml", '[prompt]\ntemplate = """\nwidth = 0 {history}"""\n[beam]\nwidth = 0', ", line 5: beam.width must"),
        ("x.toml", "[server.port]\nx = 1\n", "server.port must be an integer, not {'x': 1}"),
        ("x.toml", "port = 1\n", ", line 1: there is no section 'port' in the configuration; the field is"),
        ("x.toml", "\n[sever]\n", ", line 2: there is no section 'sever' in the configuration; the nearest is 'serv"),
        ("x.toml", "server = 1\n", ", line 1: server must be a section with fields"),
        ("x.toml", "[beam]\nwidth == 7\n", ", line 2: is not TOML: Invalid value"),
        ("x.toml", "[beam]\nwidth = 7\nwidth = 8\n", ", line 3: is not TOML: Cannot overwrite a value"),
        ("x.toml", f"x = {'9' * 5000}\n", ": is not TOML: "),
        ("x.toml", "[train]\nheads = 3\n", ", line 2: train.heads (3) must be a multiple of train.kv_heads"),
        ("x.json", '{\n"beam": {"widht": 7}}', ", line 2: there is no field 'beam.widht' in the configuration"),
        ("x.json", '{"beam":\n {"width": 7,}}', ", line 2: is not JSON: "),
        ("x.json", '{"beam": {"width": 7, "width": 8}}', ", line 1: the name 'width' stands twice in one place"),
        ("x.json", '{"beam": {"width": 7},\n"x": [{"a": 1}, {"a": 1,\n"\\u0061": 2}]}', ", line 3: the name 'a' "),
        ("x.json", '{"model": {"name": "}: \\"beam\\": {"},\n"beam":\n {"\\u0077idth": "7"}}', ", line 3: beam.width"),
        ("x.json", '{"profiles": {"tokens":\n[8, 4]},\n"beam": {}}', ", line 1: profiles.tokens"),
        ("x.json", '{"server":\n1}', ", line 1: server must be a section with fields"),
        ("x.json", '{"train": {"kv_heads": 2,\n"heads": 3}}', ", line 2: train.heads (3) must be a multiple of "),
        ("x.json", '{"beam": {"width": NaN}}', ", line 1: beam.width must be an integer, not nan"),
        ("x.json", "[" * 100_000, ": is not JSON: "),
        ("x.json", "[1]", ": must hold sections with fields"),
        ("x.json", '{"profiles": {"tokens": [[1]]}}', ", line 1: profiles.tokens must be integers such as (1, 8)"),
        ("x.json", '{"rank": {"scorer": "x"}}', "'rank.scorer' any more; it is called 'rank.method' now"),
        ("x.yaml", "server:\n  port: 1\n  prot: 2\n", ", line 3: there is no field 'server.prot'"),
        ("x.yaml", "\nsever:\n  port: 1\n", ", line 2: there is no section 'sever'"),
        ("x.yaml", "\nserver: 1\n", ", line 2: server must be a section with fields"),
        ("x.yaml", "beam:\n  width: '7'\n", ", line 2: beam.width must be an integer, not '7'"),
        ("x.yaml", "beam:\n  width: 010\n", ", line 2: beam.width must be an integer, not '010'"),
        ("x.yaml", "beam:\n  width: 1:30\n", ", line 2: beam.width must be an integer, not '1:30'"),
        ("x.yaml", "train:\n  times: yes\n", ", line 2: train.times must be true or false, not 'yes'"),
        ("x.yaml", "model:\n  path:\n", ", line 2: model.path must be text, not None"),
        ("x.yaml", "server:\n  api_key: # soon\n", ", line 2: server.api_key must be text, not ***"),
        ("x.yaml", "profiles:\n  tokens: 64\n", ", line 2: profiles.tokens must be integers such as (1, 8), not '64'"),
        ("x.yaml", "beam: {width: 7, width: 8}\n", ", line 1: the name 'width' stands twice in one place"),
        ("x.yaml", "beam:\n  width: !!python/name:os.system\n", ", line 2: a value that begins with ! must stand in"),
        ("x.yaml", "model:\n  name: !env NAME\n", ", line 2: a value that begins with ! must stand in quotes"),
        ("x.yaml", "a: 1\n---\nb: 1\n", ": is not YAML: "),
        ("x.yaml", "a: [\n", ": is not YAML: "),
        ("x.yaml", "[" * 10_000, ": is not YAML: "),
        ("x.yaml", "- server\n", ": must hold sections with fields"),
        ("x.yaml", "beam: {<<: {width: 7}}", ", line 1: a value must be a text, a number or a list"),
        ("x.yaml", "a: \0", ": is not YAML: "),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert str(e.value).startswith(str(path))
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.toml", "[server]\napi_key = hunter2-secret\n"),
        ("x.toml", "[server]\napi_key = ['hunter2-secret']\n"),
        ("x.toml", "[server.api_key]\nhunter2-secret = 'hunter2-secret'\n"),
        ("x.json", '{"server": {"api_key": {"key": "hunter2-secret"}}}'),
        ("x.json", '{"server": {"api_key": "hunter2-secret}}'),
        ("x.yaml", "server:\n  api_key: *hunter2-secret\n"),
        ("x.yaml", "server:\n  api_key: !hunter2-secret\n"),
        ("x.yaml", "server:\n  api_key: &hunter2-secret\n"),
        ("x.yaml", "server:\n  api_key: [hunter2-secret]\n"),
        ("x.yaml", "server:\n  api_key: 'hunter2-secret\n"),
        ("x.yaml", "server:\n  api_key: '***'\n  admin_key: hunter2-secret"),
        (
            "x.py",
            "from jgr.config import *\ndef get_config(): return Config(server=ServerConfig(api_key=b'hunter2'))",
        ),
    ],
)
def test_no_error_shows_a_key(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert "hunter2" not in str(e.value)


def test_files_that_are_no_text_or_too_large_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(path)
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="holds more than"):
        load_config(path)


def test_without_pyyaml_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("beam: {width: 7}")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"reading YAML needs pyyaml: pip install 'jgr\[yaml\]'"):
        load_config(path)
    assert "width: 32" in dump(Config(), "yaml")  # writing needs none


def test_half_a_character_is_for_json_alone(tmp_path: Path) -> None:
    config = override(Config(), "model.path=/caf\udce9")
    (tmp_path / "x.json").write_text(dump(config, "json"))
    assert load_config(tmp_path / "x.json") == config
    for format in ("toml", "yaml"):
        with pytest.raises(ConfigError, match="write it as json"):
            dump(config, format)


def test_sections_of_a_manifest_are_checked_alike() -> None:
    with pytest.raises(
        ConfigError, match="there is no section 'bean' in the configuration; the nearest is 'beam'"
    ):
        from_json({"bean": {}})
    with pytest.raises(ConfigError, match="beam must be a section with fields"):
        from_json({"beam": [1]})


def test_a_long_toml_file_is_refused_without_a_line(tmp_path: Path) -> None:
    path = tmp_path / "long.toml"
    path.write_text("[server]\n" + "# port\n" * 100_000 + "port = 'x'\n")  # by lines this would take hours
    with pytest.raises(ConfigError, match=r"long\.toml: server\.port must be an integer"):
        load_config(path)
