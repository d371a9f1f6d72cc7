# SPDX-License-Identifier: Apache-2.0
"""A short name for the settings that answers come from, beside the version, which names the model's files alone.

Two processes that are to give the same answers, such as replicas of a fleet, need both.
"""

from __future__ import annotations

import hashlib
import json

from jgr.config import Config, to_json

_NO_ANSWERS = {
    "server", "fleet", "data", "train", "feedback",
    "model.path", "model.name", "model.compilation_cache", "catalog.path",
}  # fmt: skip
"""Sections and fields that make no answer what it is; the model's files and the catalog have versions of their own."""
_ANSWERS = {
    "server.unknown_items", "server.max_history", "server.max_text_bytes", "server.max_candidates",
    "server.max_filter_items", "server.explain",
}  # fmt: skip
"""Fields of these sections that do."""


def settings_digest(config: Config) -> str:
    """8 hex digits of the SHA-256 of what is set. Fields that have their defaults do not count, so that a jgr with more
    of them gives the same digits."""
    usual = to_json(Config())
    changed = {
        f"{section}.{name}": value
        for section, fields in to_json(config).items()
        for name, value in fields.items()
        if value != usual[section][name] and _counts(section, f"{section}.{name}")
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]


def _counts(section: str, field: str) -> bool:
    return field in _ANSWERS or not {section, field} & _NO_ANSWERS
