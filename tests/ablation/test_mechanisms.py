# SPDX-License-Identifier: Apache-2.0
"""The table of mechanisms names real fields, every switch changes the configuration, and the page is made of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jgr.ablation.counts import COUNTS
from jgr.ablation.mechanisms import SYSTEMS, find
from jgr.ablation.report import listing, markdown
from jgr.ablation.system import ALL, LARGEST, NONE, System, configured, variants
from jgr.config import Config, UserError, override
from jgr.config.tree import field_types
from jgr.serving.engine.metrics import documentation
from tools.ablation_table import PAGE, main, page

EVERY = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
SUFFIXES = re.compile(r"_(total|count)$")


def base(system: System) -> Config:
    return override(Config(), *system.base)


@EVERY
def test_every_setting_is_a_field_and_every_switch_changes_the_configuration(system: System) -> None:
    fields = field_types(Config)
    named = [setting for variant in variants(system) for setting in variant.settings]
    assert {setting.partition("=")[0] for setting in named} <= set(fields)
    configs = {variant.name: configured(base(system), variant.settings) for variant in variants(system)}
    same = [name for name, config in configs.items() if name != ALL and config == configs[ALL]]
    assert same == []
    assert len(set(map(str, configs.values()))) == len(configs), "two variants are the same"


@EVERY
def test_all_off_has_every_switch_off_that_is_on(system: System) -> None:
    """What a mechanism's switch sets, all off sets as well, or another mechanism's switch of the same field."""
    off = {setting.partition("=")[0]: setting for setting in system.off}
    on = {setting.partition("=")[0]: setting for setting in system.on}
    for one in system.mechanisms:
        for setting in one.settings:
            field = setting.partition("=")[0]
            if one.added:
                assert setting != on.get(field), one.name
            elif field not in (
                "cache.rule",
                "features.buckets",
            ):  # of no meaning without the cache that is off
                assert off[field] != on.get(field, ""), one.name


@EVERY
def test_variants_are_all_on_each_mechanism_alone_and_all_off(system: System) -> None:
    every = variants(system)
    assert (every[0].name, every[-1].name) == (ALL, NONE)
    assert [one.mechanism for one in every[1:-1]] == list(system.mechanisms)
    assert all(one.settings[: len(system.on)] == system.on for one in every[:-1])
    assert len({one.name for one in every}) == len(every)


@EVERY
def test_numbers_are_those_of_a_specification_and_none_is_left_unsaid(system: System) -> None:
    numbers = [n for one in (*system.mechanisms, *system.fixed) for n in one.numbers]
    assert all(re.fullmatch(r"(BAT|XGR|FLAME|RCLLM|HLEM|MODEL|PIC)-\d+", number) for number in numbers)
    # Up to here a specification says how the system works; what follows is training, pseudo-code and checks.
    last = {"bat": 15, "xgr": 18, "flame": 13, "rcllm": 14, "hlem": 16}[system.name]
    wanted = {f"{system.name.upper()}-{n}" for n in range(1, last + 1)}
    assert wanted - set(numbers) == set()


@EVERY
def test_counts_are_series_that_a_server_shows(system: System) -> None:
    families = set(documentation())
    assert {name for name in system.counts if SUFFIXES.sub("", COUNTS[name].name) not in families} == set()


def test_the_largest_size_is_that_of_the_models_own_configuration() -> None:
    config = override(Config(), "profiles.tokens=16,64,512", "executors.sizes=4,8")
    found = configured(config, [f"profiles.tokens={LARGEST}", f"executors.sizes={LARGEST}", "beam.width=3"])
    assert (found.profiles.tokens, found.executors.sizes, found.beam.width) == ((512,), (8,), 3)


def test_an_unknown_system_names_the_nearest() -> None:
    assert find("xgr").name == "xgr"
    with pytest.raises(UserError, match="no system 'flam' to take apart; the nearest is 'flame'"):
        find("flam")


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python -m tools.ablation_table"


def test_the_tool_writes_the_page_and_tells_of_missing_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "ablations.md"
    copy.write_text(PAGE.read_text().replace("cache.policy=cache_agnostic", "another"))
    monkeypatch.setattr("tools.ablation_table.PAGE", copy)
    assert main() == 0
    assert copy.read_text() == PAGE.read_text()
    copy.write_text("nothing")
    assert main() == 2
    assert "must hold" in capsys.readouterr().err


@EVERY
def test_listing_and_page_say_every_switch(system: System) -> None:
    told, table = "\n".join(listing([system])), markdown([system])
    for one in system.mechanisms:
        assert f"{', '.join(one.numbers)}: {'with' if one.added else 'without'} {one.name}: " in told
        assert all(setting in told and f"`{setting}`" in table for setting in one.settings)
        assert one.differs in table
    for fixed in system.fixed:
        assert fixed.instead in table
    assert all(len(line) <= 110 for line in told.splitlines())
    narrow = listing([system], 80)
    assert all(len(line) <= 80 for line in narrow) and " ".join(narrow).split() == told.split()
