# SPDX-License-Identifier: Apache-2.0
"""What an engine with a cache does when it starts over entries that another version left."""

from __future__ import annotations

import numpy as np

from jgr.cache.entries import Content, Name
from jgr.cache.memory import Memory
from jgr.cache.meta import CacheMeta
from jgr.models.packed import KVCells
from jgr.models.words import Cells
from jgr.serving.decoders.caching import Caching, kv_room


def test_what_a_moved_boundary_sends_to_the_host_is_copied_before_another_model_plans() -> None:
    memory = Memory(8 / 1024, 8 / 1024, 1, {"m": 1.0})
    kv = KVCells("float32", 128, 2, 1, 1, Cells.of(1024, 1024))
    assert memory.host is not None
    lease = memory.lease("m", lambda: CacheMeta(memory.pages, {"user": kv_room(kv)}, None, memory.host.pages))
    name, content = Name("user", "u", "user_prefix"), Content.of(np.arange(2, dtype=np.int32))
    entry = lease.held.extend(name, content)
    assert entry is not None
    lease.held.written(entry)
    lease.held.release(entry)
    memory.pool.write(lambda array: array + np.uint32(7), 0)
    Caching(memory, lease, kv, {"user": 0}, {}, None).start()
    memory.host.catch_up()  # as every thread does that is about to dispatch
    memory.pool.write(lambda array: array * np.uint32(0), 0)  # the page is another model's
    lease.held.set_limit("user", memory.pages.count)
    back = lease.held.find(name, content)
    assert back is not None
    memory.host.plan(lease.held.take_moves(), kv.cells, 0)
    memory.host.catch_up()
    (cell,) = back.cells
    assert (memory.pool.read(np.asarray, 0)[cell] == 7).all()
