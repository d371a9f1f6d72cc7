# SPDX-License-Identifier: Apache-2.0
"""Items that were built ahead (fleet.kv): they are what the engine computes, and replicas are warm at once.

As in test_items.py, all replicas of the file serve one folder, and each test's are new.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jgr.cli import kv
from jgr.config import ConfigError, UserError, override
from jgr.models.manifest import folder_config
from jgr.placement.kv_folder import KvFolder
from jgr.serving.cluster.items import FOLDER
from jgr.serving.cluster.record import NoOthers, Record
from tests.serving.cluster.local import LocalFleet, LocalReplica
from tests.serving.cluster.sharing import (
    HISTORY,
    IDS,
    SETTINGS,
    Reference,
    item_bytes,
    scores,
    served,
    share,
    write_ranker,
)
from tests.serving.decoders.test_cached_server import N_ITEMS

ROOT = Path(__file__).resolve().parents[3]
KILLED = """
import os, signal
from jgr.placement.kv_folder import KvBuilder
def add(self, blocks, add=KvBuilder.add, left=[1]):
    if not left:
        self._blocks.write(b"half")
        self._blocks.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    left.pop()
    add(self, blocks)
KvBuilder.add = add
from jgr.cli.main import run
run()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ranker(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Reference]:
    """Scores of the items of these rows, in one prompt, as `scores` has them."""
    reference = Reference(folder)
    yield reference
    reference.close()


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of all items' keys and values, whose build was killed in the middle of a block and begun again."""
    out = tmp_path_factory.mktemp("kv") / "kv"
    settings = [f"--set={setting}" for setting in SETTINGS]
    command = [sys.executable, "-c", KILLED, "kv", "build", str(folder), f"--out={out}", *settings]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (out / "blocks.bin").read_bytes().endswith(b"half")
    report = asyncio.run(kv.build(override(folder_config(str(folder)), *SETTINGS), out))
    assert report["items"] == N_ITEMS and 0 < report["new"] < N_ITEMS, "what was there was not built again"
    yield out


def test_what_was_built_ahead_is_what_the_engine_computes(folder: Path, built: Path) -> None:
    """The keys and values of the files, as numbers, beside those that stand in the engine's cache after a request."""

    async def run(fleet: LocalFleet) -> None:
        from jgr.serving.decoders.caching import identity
        from jgr.serving.decoders.item_blocks import compute

        engine = fleet.replicas["a"].models.deployments[0].engine
        caching = engine.served.caching
        found = KvFolder(built, identity(engine.info.version.rpartition("@")[2], caching.kv))
        assert len(found) == N_ITEMS
        for at in range(0, N_ITEMS, 7):
            rows = list(range(at, min(at + 7, N_ITEMS)))
            computed = await compute(engine, rows)
            assert list(computed) == rows
            for row in rows:
                block = found.read(caching.segments.content(row).digest)
                assert block is not None
                ours, theirs = (each.words.view(np.float32) for each in (block, computed[row]))
                assert np.abs(ours).max() > 0.1
                np.testing.assert_allclose(ours, theirs, atol=1e-5)

    served(folder, [], run, count=1)


def test_a_replica_with_a_folder_is_warm_at_once(folder: Path, built: Path, alone: Reference) -> None:
    async def run(fleet: LocalFleet) -> None:
        for name, ready in (("a", False), ("b", True)):
            if ready:
                assert await fleet.placements.look()
            answer = await fleet.rank(name, HISTORY, IDS[:6])
            assert scores(answer) == alone(range(6))
            assert answer["usage"]["cached_tokens"] == 12, "nothing is computed that is in the folder"
        assert await item_bytes(fleet, "a", "placement") == 0
        assert share(fleet, "a").counts()["bytes_per_s"] is None, "it has read files alone, which are no link"
        links = share(fleet, "a")._links
        for _ in range(200):
            for nbytes in (1_000_000, 50_000_000):
                links.observe(1, nbytes, nbytes)
                links.observe(FOLDER, nbytes, nbytes // 40)
        assert share(fleet, "a").counts()["bytes_per_s"] == pytest.approx(1e9, rel=0.01)

    served(folder, ["fleet.items=hash", f"fleet.kv={built}"], run)


def test_what_cannot_be_read_from_the_folder_is_computed_and_placed(
    folder: Path, built: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: KvFolder, digest: bytes) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run(fleet: LocalFleet) -> None:
        assert await fleet.placements.look()
        assert [share(fleet, name)._items().placed for name in "ab"] == [N_ITEMS // 2] * 2

    monkeypatch.setattr(KvFolder, "read", broken)
    served(folder, ["fleet.items=hash", f"fleet.kv={built}"], run)
    assert "items of node folder are computed: [Errno 5] Input/output error" in caplog.messages


def test_a_replica_that_comes_later_does_without_a_folder_that_is_gone(
    folder: Path, alone: Reference
) -> None:
    class Serving(NoOthers):
        async def record(self, source: str) -> Record:
            return Record(source, number=1)

    async def run() -> None:
        fleet = LocalFleet(folder, [*SETTINGS, "fleet.items=hash", "fleet.kv=/nowhere"], 1)
        fleet.replicas["a"] = LocalReplica(fleet.source, "a", Serving())
        await fleet.start()
        assert scores(await fleet.rank("a", HISTORY, IDS[:6])) == alone(range(6))
        await fleet.close()

    asyncio.run(run())


def test_a_folder_of_other_cells_is_refused(folder: Path, built: Path) -> None:
    with pytest.raises(UserError, match="of another model, or of other cells"):
        settings = [*SETTINGS, "fleet.items=hash", f"fleet.kv={built}", "cache.cell_tokens=4"]
        asyncio.run(LocalFleet(folder, settings, 1).start())
    with pytest.raises(ConfigError, match=r"fleet\.alpha"):
        LocalFleet(folder, ["fleet.alpha=2"], 1)
