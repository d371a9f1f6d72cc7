# SPDX-License-Identifier: Apache-2.0
"""The control groups of this process, by which Linux limits what a container may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that may limit a controller, such as "cpu", version 1 and 2, and of those around them.

    root: of the file system that says so. In a container the names can be the host's: then the group's own folder is
    missing, and its limit stands at the top. What cannot be read has no groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(name)
        for each in (group, *group.parents):
            yield root / "sys/fs/cgroup" / controllers / each.relative_to("/")
