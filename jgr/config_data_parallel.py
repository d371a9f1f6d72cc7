# SPDX-License-Identifier: Apache-2.0
"""The section of the configuration on devices that have the same weights and part the requests; see `jgr.config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jgr.fields import check, require

MAX_DEVICES = 64
"""The most devices of one process. No machine has more."""


@dataclass(frozen=True)
class DataParallelConfig:
    """Devices of one process that have the same weights and part each batch, for more traffic than one can serve."""

    # Devices that each have all of the weights, a row of every batch, and a cache of cache.device_mb. For decoders
    # whose prompts are packed: with a cache.policy, and candidates in the prompt where they rank. 1: one device.
    devices: int = 1
    # How a batch gets cached items that another device has. copies: from device to device, as many as are missed;
    # all_to_all: by one collective program, which moves equally much between all pairs; compute: not at all, each
    # device computes and keeps its own. Neither of the first two goes before they have been measured on several GPUs.
    reads: Literal["copies", "all_to_all", "compute"] = "copies"
    # Share of a device's pages for items that may hold copies of what other devices have: of the items that are asked
    # for most. All others stay on one device (hot replicated, cold sharded).
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        check(self, devices=1, hot_share=0)
        require(
            self.devices <= MAX_DEVICES,
            f"data_parallel.devices must be at most {MAX_DEVICES}, not {self.devices}",
        )
        require(self.hot_share <= 1, f"data_parallel.hot_share must be at most 1, not {self.hot_share}")
