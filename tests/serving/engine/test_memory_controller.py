# SPDX-License-Identifier: Apache-2.0
"""Files of memory controllers: the shipped one, and damaged ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jgr.config import ConfigError, MemoryConfig
from jgr.serving.engine.memory_controller import MOST_BYTES, SHIPPED, make_controller, read_controller
from jgr.serving.policies.memory_control import Full, Pid, Ppo, Predictor, Static
from jgr.serving.policies.memory_models import ControllerError
from jgr.serving.policies.memory_signals import Signals


@pytest.mark.parametrize(
    ("name", "kind"),
    [("static", Static), ("pid", Pid), ("predictor", Predictor), ("ppo", Ppo), ("full", Full)],
)
def test_each_name_makes_its_controller_from_the_shipped_file(name: str, kind: type) -> None:
    made = make_controller(MemoryConfig(controller=name, split=0.4))  # type: ignore[arg-type]
    assert type(made) is kind
    told = Signals(0.2, 0.3, 0.6, 8000.0, 0.0, 20.0, 300)
    assert 0.1 <= made.decide(told) <= 0.9


def test_the_shipped_file_is_small() -> None:
    assert SHIPPED.stat().st_size < 200_000


def test_a_file_cut_short_anywhere_is_a_named_error(tmp_path: Path) -> None:
    whole, path = SHIPPED.read_bytes(), tmp_path / "cut.npz"
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ControllerError, match=r"cut\.npz"):
            make_controller(MemoryConfig(controller="ppo", file=str(path)))


def test_a_file_of_another_state_is_refused_with_its_size(tmp_path: Path) -> None:
    arrays = read_controller(SHIPPED)
    path = tmp_path / "six.npz"
    np.savez(path, **(arrays | {"features": arrays["features"][:6]}))  # type: ignore[arg-type]
    with pytest.raises(ControllerError, match=r"six\.npz: .*state of 6 numbers"):
        make_controller(MemoryConfig(controller="full", file=str(path)))
    with pytest.raises(ControllerError, match=r"none\.npz: No such file"):
        make_controller(MemoryConfig(controller="full", file=str(tmp_path / "none.npz")))


def test_objects_and_what_unpacks_to_too_much_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, features=np.array([{}], object))
    with pytest.raises(ControllerError, match="not a controller's file"):
        read_controller(path)
    content = io.BytesIO()
    np.save(content, np.zeros(MOST_BYTES, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w0.npy", content.getvalue())
    assert path.stat().st_size < 100_000
    with pytest.raises(ControllerError, match="at most"):
        read_controller(path)


def test_the_section_says_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"memory\.split \(0\.95\)"):
        MemoryConfig(split=0.95)
    with pytest.raises(ConfigError, match=r"memory\.epoch_s"):
        MemoryConfig(epoch_s=0.0)
