# SPDX-License-Identifier: Apache-2.0
"""Every raw format, by the name that `jgr prepare --source` takes."""

from __future__ import annotations

from jgr.data.sources import amazon, generic, gowalla, kuairand, minionerec, movielens
from jgr.data.sources.records import Source

SOURCES: dict[str, Source] = {
    **movielens.SOURCES,
    **amazon.SOURCES,
    **minionerec.SOURCES,
    **gowalla.SOURCES,
    **kuairand.SOURCES,
    **generic.SOURCES,
}
