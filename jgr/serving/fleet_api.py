# SPDX-License-Identifier: Apache-2.0
"""The part of the wire contract (`jgr.serving.api`) that tells what each replica of a fleet serves."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, UnsetType

ReloadState = Literal["never", "running", "done", "failed", "cancelled"]


class ServedVersion(Struct, kw_only=True, frozen=True):
    """The version of a model, and of its catalog, that one replica of a fleet serves."""

    id: Annotated[str, Meta(description="The model's name.")]
    version: Annotated[str, Meta(description="The version, as answers name it.")]
    settings: Annotated[str, Meta(description="Hash of the settings, see ModelInfo.")] = ""
    catalog_version: Annotated[str, Meta(description="Content hash of the catalog.")]
    state: Annotated[
        Literal["starting", "ready", "draining", "failed"],
        Meta(description="Whether the replica serves the model, which it does in the state ready."),
    ]
    reload: Annotated[ReloadState, Meta(description="State of the replica's last reload or rollback.")]
    reload_error: Annotated[
        str | None, Meta(description="Why the replica's last reload failed, see ModelInfo.")
    ] = None


class ReplicaInfo(Struct, kw_only=True, frozen=True):
    """A replica of a fleet, and what it serves."""

    name: Annotated[str, Meta(description="The replica's name, as the label `replica` of /metrics has it.")]
    node: Annotated[
        str, Meta(description="The machine that it runs on, and the machine's id in the cluster.")
    ]
    state: Annotated[
        Literal["starting", "ready", "draining", "failed"],
        Meta(description="Whether the replica serves all of its models."),
    ]
    models: Annotated[list[ServedVersion], Meta(description="What it serves of each model.")]


class Rollout(Struct, kw_only=True, frozen=True):
    """The last change of a fleet, which goes from one replica to the next."""

    state: Annotated[
        Literal["never", "running", "done", "failed"],
        Meta(
            description="never: there was none since the coordinator began. failed: `back` tells who goes back."
        ),
    ] = "never"
    path: Annotated[str | None, Meta(description="What was asked for, as in /v1/models/shop/reload.")] = None
    of: Annotated[int, Meta(description="Number of replicas that served when it began.")] = 0
    done: Annotated[tuple[str, ...], Meta(description="Names of the replicas that have changed.")] = ()
    replica: Annotated[str | None, Meta(description="Name of the replica at which it failed.")] = None
    error: Annotated[str | None, Meta(description="Why it failed there.")] = None
    back: Annotated[tuple[str, ...], Meta(description="Names of the replicas that have gone back.")] = ()


Replicas = Annotated[
    list[ReplicaInfo] | UnsetType,
    Meta(
        description="Only of a fleet (`jgr cluster`), whose `data` is what one replica says: what each replica serves."
    ),
]
LastRollout = Annotated[
    Rollout | UnsetType | None,
    Meta(description="Only of a fleet: its last change. null: what keeps it does not answer."),
]
ReadyReplicas = Annotated[
    int | UnsetType, Meta(description="Only of a fleet that is ready: how many of its replicas serve.")
]
WantedReplicas = Annotated[
    int | UnsetType, Meta(description="Only of a fleet: how many replicas there should be.")
]
