# SPDX-License-Identifier: Apache-2.0
"""What the pages that come with jgr have in common: a content security policy, and headers that go with it."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = "default-src 'none'"
CLOSED = ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")


def policy(*allowed: str) -> str:
    """The content security policy of a page that may do what is allowed, and nothing else."""
    return "; ".join((NOTHING, *allowed, *CLOSED))


def page_headers(content_policy: str) -> Mapping[str, str]:
    """The headers of a page and of its files; they are asked for anew each time."""
    return {
        "Content-Security-Policy": content_policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
