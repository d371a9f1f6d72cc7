# SPDX-License-Identifier: Apache-2.0
"""Writes the pictures of docs/ui.md: the page /ui of a server of the demo's shop.

    jgr serve runs/shop --set server.explain=true --set cache.policy=user --set cache.device_mb=64
    python -m tools.ui_pictures http://127.0.0.1:8000

Needs Debian's chromium, and playwright of jgr[dev].
"""

from __future__ import annotations

ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""A browser that shows a page and asks nobody for anything of its own."""
