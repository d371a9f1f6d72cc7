# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs after a process that was killed while it wrote to it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jgr.serving.engine.compilation import use_compilation_cache


@pytest.fixture(autouse=True)
def _other_cache() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def compile_once() -> None:
    jax.jit(lambda x: x * 3 + 1).lower(
        np.ones(5, np.float32)
    ).compile()  # a new function: only the folder knows it


def test_a_program_that_was_cut_short_is_compiled_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_compilation_cache(tmp_path)
    compile_once()
    entry = max(tmp_path.glob("*-cache"), key=lambda path: path.stat().st_size)
    content = entry.read_bytes()
    for cut in (content[: len(content) // 2], b"", content[:-1]):
        entry.write_bytes(cut)
        use_compilation_cache(tmp_path)
        assert not entry.exists() and "1 programs were cut short" in caplog.text
        caplog.clear()
        compile_once()
        assert zlib.decompress(entry.read_bytes())
    use_compilation_cache(tmp_path)
    assert entry.exists() and not caplog.text


def test_programs_are_looked_at_once(tmp_path: Path) -> None:
    """Else a start would read all that was ever compiled."""
    use_compilation_cache(tmp_path)
    torn = [tmp_path / "jit_old-0-cache", tmp_path / "jit_new-0-cache"]
    for path in torn:
        path.write_bytes(b"\x78\x9c")
    os.utime(torn[0], (0, 0))
    use_compilation_cache(tmp_path)
    assert [path.exists() for path in torn] == [True, False]
