# SPDX-License-Identifier: Apache-2.0
"""What an engine did, in counts that are the same on a busy machine: read off its own series.

The one idea: a count is a sum of series of /metrics, so what is told here is what anybody sees who watches a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Count(NamedTuple):
    """A sum over series. name: of the series. where: values that a label may have; a label that is not named may have
    any. what: in words."""

    name: str
    where: Mapping[str, Sequence[str]]
    what: str


COUNTS: Mapping[str, Count] = {
    "computed": Count(
        "jgr_prompt_tokens_total", {"source": ("computed",)}, "prompt tokens (of scorers: events) that were computed"
    ),
    "reused": Count(
        "jgr_prompt_tokens_total", {"source": ("cached",)}, "prompt tokens (of scorers: events) taken from the cache"
    ),
    "asked tokens": Count("jgr_real_tokens_total", {}, "token positions, beams too, that requests asked for"),
    "padded tokens": Count("jgr_padded_tokens_total", {}, "the same with the padding of the compiled shapes"),
    "runs": Count("jgr_batch_size_count", {}, "programs dispatched"),
    "user first": Count("jgr_layouts_total", {"layout": ("user_prefix",)}, "answers with the user first"),
    "items first": Count("jgr_layouts_total", {"layout": ("item_prefix",)}, "answers with the items first"),
    "evicted": Count(
        "jgr_cache_events_total", {"event": ("user_evicted", "item_evicted")}, "entries that left the cache"
    ),
    "to host": Count("jgr_cache_events_total", {"event": ("to_host",)}, "entries moved to the host's memory"),
    "from host": Count("jgr_cache_events_total", {"event": ("to_device",)}, "entries that came back from there"),
    "pages": Count("jgr_cache_pages", {"holder": ("user", "item")}, "pages of the cache in use at the end"),
    "parts": Count("jgr_parts_total", {"size": ("1..",)}, "parts of candidates that were run"),
    "user parts": Count("jgr_parts_total", {"size": ("0",)}, "runs for the user alone"),
    "pairs": Count("jgr_pairs_total", {"of": ("candidates",)}, "pairs of a user and a candidate that were scored"),
    "padding pairs": Count("jgr_pairs_total", {"of": ("padding",)}, "pairs that were padding"),
    "looked up": Count("jgr_features_total", {}, "rows of features that requests asked for"),
    "missing": Count("jgr_features_total", {"state": ("missing",)}, "rows that were not there in time"),
    "round trips": Count("jgr_feature_events_total", {"event": ("round_trips",)}, "questions to the feature store"),
    "fetched": Count("jgr_feature_events_total", {"event": ("fetched",)}, "rows that the store gave"),
    "row hits": Count(
        "jgr_embedding_rows_total", {"event": ("hits",)}, "rows (embeddings, features) that were found on the device"
    ),
    "row misses": Count("jgr_embedding_rows_total", {"event": ("misses",)}, "rows that were not found there"),
    "collateral": Count(
        "jgr_embedding_rows_total", {"event": ("collateral",)}, "rows in use that went with their page"
    ),
    "refilled": Count("jgr_embedding_rows_total", {"event": ("refilled",)}, "embedding rows that were fetched ahead"),
    "row bytes": Count("jgr_embedding_bytes_total", {}, "bytes of rows that were sent to the device for it"),
    "moves": Count("jgr_border_moves_total", {"of": ("moves",)}, "times that the border was set"),
    "pages moved": Count(
        "jgr_border_moves_total", {"of": ("to_rows", "to_users")}, "pages that changed sides at the border"
    ),
    "store bytes": Count("jgr_feature_events_total", {"event": ("bytes",)}, "bytes that the store gave"),
}  # fmt: skip
"""Every count, by the name that tables have for it."""

_ABOVE_ZERO = "1.."
"""Stands for every whole number above 0."""


def read(series: str, names: Sequence[str]) -> dict[str, int]:
    """The counts of these names in the text of /metrics; 0 where an engine has no such series."""
    samples = list(_samples(series))
    found = {}
    for name in names:
        count = COUNTS[name]
        matching = (
            value
            for series_name, labels, value in samples
            if series_name == count.name
            and all(_is_one_of(labels.get(label, ""), allowed) for label, allowed in count.where.items())
        )
        found[name] = round(sum(matching))
    return found


def _is_one_of(value: str, allowed: Sequence[str]) -> bool:
    return value in allowed or (_ABOVE_ZERO in allowed and value not in ("", "0"))


def _samples(series: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(series):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
