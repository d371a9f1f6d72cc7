# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a fleet, whose series have the label `replica`, and `front` where they are of routing."""

from __future__ import annotations

from tools.dashboard_parts import CACHED, TOKENS, TOTAL, Board, Panel, gauge, quantiles, rate

FLEET = Board(
    "fleet",
    "jgr: fleet",
    (
        Panel(
            "Answered in time",
            "reqps",
            ((rate("jgr_stage_seconds_count", "replica", TOTAL), "{{replica}}"),),
        ),
        Panel("Latency, P99", "s", quantiles("jgr_stage_seconds", "replica", TOTAL, (0.99,))),
        Panel("Refused by the queue", "reqps", ((rate("jgr_rejected_total", "replica"), "{{replica}}"),)),
        Panel("Waiting requests", "short", ((gauge("jgr_queue_depth", "replica"), "{{replica}}"),)),
        Panel("Device time", "percentunit", ((rate("jgr_device_seconds_total", "replica"), "{{replica}}"),)),
        Panel(
            "Tokens read from the cache",
            "percentunit",
            ((f"{rate(TOKENS, 'replica', CACHED)} / {rate(TOKENS, 'replica')}", "{{replica}}"),),
        ),
        Panel(
            "Evictions",
            "short",
            ((rate("jgr_cache_events_total", "replica", 'event=~".*_evicted"'), "{{replica}}"),),
        ),
        Panel(
            "Routed to",
            "reqps",
            ((rate("jgr_fleet_routed_total", "replica, rule", model=False), "{{replica}} {{rule}}"),),
        ),
        Panel(
            "Attempts",
            "reqps",
            (
                (rate("jgr_fleet_attempts_total", "outcome", model=False), "{{outcome}}"),
                (rate("jgr_fleet_retries_total", model=False), "after another one"),
            ),
        ),
        Panel(
            "Time of a decision",
            "s",
            tuple(
                (
                    f"histogram_quantile({q:g}, "
                    f"{rate('jgr_fleet_decision_seconds_bucket', 'le', model=False)})",
                    f"P{100 * q:g}",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "Age of the reports",
            "s",
            (("max by (replica) (jgr_fleet_report_age_seconds)", "{{replica}}"),),
        ),
        Panel(
            "Tokens in flight",
            "short",
            (("sum by (replica) (jgr_fleet_tokens_in_flight)", "{{replica}}"),),
        ),
        Panel(
            "Refused before a replica",
            "reqps",
            (
                (rate("jgr_fleet_refused_total", model=False), "a key's rate"),
                (rate("jgr_fleet_held_off_total", model=False), "too many at the door"),
            ),
        ),
        Panel(
            "Items from other nodes",
            "binBps",
            ((f"{rate('jgr_fleet_item_bytes_total', 'purpose', model=False)} or vector(0)", "{{purpose}}"),),
        ),
        Panel(
            "Items that were not there",
            "reqps",
            (
                (
                    f"{rate('jgr_fleet_items_missing_total', 'outcome', model=False)} or vector(0)",
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Items held for all nodes",
            "short",
            (("sum by (replica) (jgr_fleet_items_held) or vector(0)", "{{replica}}"),),
        ),
        Panel(
            "Versions",
            "short",
            (
                (
                    'count by (model, version) (jgr_model_info{model=~"$model", replica!=""})',
                    "{{model}} {{version}}",
                ),
            ),
        ),
    ),
)
"""The board of a fleet, by its replicas."""
