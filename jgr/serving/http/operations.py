# SPDX-License-Identifier: Apache-2.0
"""The list of all operations over HTTP: what each takes and answers, who may ask, and its name in generated clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jgr.config import ServerConfig
from jgr.serving import api, catalog_api, explanations, prefill
from jgr.serving.errors import ErrorType
from jgr.serving.http import docs_page, items, kserve, rerank, ui_page

Group = Literal["health", "metrics", "docs", "ui"]
"""What may be open to everybody while the rest needs a key."""
BINARY = "application/octet-stream"
TAGS = {
    "requests": "Items for a user: generate them, or put given ones in order.",
    "compatible": "The same requests in the shapes of Jina, Cohere and vLLM.",
    "kserve": "The same requests as tensors: KServe's Open Inference Protocol v2, as Triton's clients speak it.",
    "models": "What is served, and how it is replaced.",
    "catalogs": "The items that may be recommended.",
    "users": "What is kept of a user.",
    "server": "The process: health, metrics, this description.",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of the query that is optional. schema: as OpenAPI has it."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    id: the name of its function in generated clients. tag: one of TAGS. answer, request: the struct of the body, or the
    media type of a body that is not JSON. binary: the bodies may have BINARY instead. group: what it is opened with.
    admin: an admin's key is needed. of_model: the query parameter `model` may name the model. of_tenant: `tenant` may
    name the key whose users are meant. parameters: others of the query.
    """

    method: str
    path: str
    id: str
    tag: str
    summary: str
    answer: type[msgspec.Struct] | str
    request: type[msgspec.Struct] | str | None = None
    errors: tuple[ErrorType, ...] = ()
    group: Group | None = None
    admin: bool = False
    of_model: bool = False
    of_tenant: bool = False
    parameters: tuple[Parameter, ...] = ()
    binary: bool = False
    status: int = 200


_HOT: tuple[ErrorType, ...] = (
    "invalid_json",
    "body_too_large",
    "not_found",
    "invalid_request",
    "overloaded",
    "internal",
    "unavailable",
    "deadline_exceeded",
)
_CHANGE: tuple[ErrorType, ...] = (
    "forbidden",
    "not_found",
    "conflict",
    "body_too_large",
    "invalid_request",
    "unavailable",
)
_NAMED: tuple[ErrorType, ...] = ("not_found", "invalid_request")


def _kserve_model(of: str, suffix: str) -> tuple[Operation, ...]:
    """The three operations on a KServe model. of, suffix: what in the path, and in the ids, names a version."""
    path = f"/v2/models/{{name}}{of}"
    return (
        Operation(
            "get",
            path,
            f"kserve_model{suffix}",
            "kserve",
            "Describe a KServe model's tensors",
            kserve.ModelMetadata,
            errors=_NAMED,
        ),
        Operation(
            "get",
            f"{path}/ready",
            f"kserve_model_ready{suffix}",
            "kserve",
            "Tell whether a KServe model serves",
            kserve.ModelReady,
            errors=(*_NAMED, "unavailable"),
        ),
        Operation(
            "post",
            f"{path}/infer",
            f"kserve_infer{suffix}",
            "kserve",
            "Ask a KServe model, recommend or rank",
            kserve.InferAnswer,
            kserve.InferRequest,
            _HOT,
            binary=True,
        ),
    )


OPERATIONS = (
    Operation(
        "post",
        "/v1/recommend",
        "recommend",
        "requests",
        "Generate items for a history",
        api.Answer,
        api.RecommendRequest,
        _HOT,
    ),
    Operation(
        "post",
        "/v1/rank",
        "rank",
        "requests",
        "Score given candidates for a history",
        api.Answer,
        api.RankRequest,
        _HOT,
    ),
    Operation(
        "post",
        "/v1/explain/recommend",
        "explain_recommend",
        "requests",
        "Generate items, and show the beams of every level; only if the server has server.explain",
        explanations.RecommendExplanation,
        api.RecommendRequest,
        _HOT,
    ),
    Operation(
        "post",
        "/v1/explain/rank",
        "explain_rank",
        "requests",
        "Score candidates, and show where the prompt came from; only if the server has server.explain",
        explanations.RankExplanation,
        api.RankRequest,
        _HOT,
    ),
    Operation(
        "post",
        "/v1/users/{user_id}/prefill",
        "prefill",
        "users",
        "Compute and keep the part of a user who is about to be ranked",
        prefill.Prefilled,
        prefill.PrefillRequest,
        _HOT,
    ),
    Operation(
        "post",
        "/v1/rerank",
        "rerank",
        "compatible",
        "Rank documents, which are item ids, in the shape of Jina and Cohere",
        rerank.RerankAnswer,
        rerank.RerankRequest,
        ("not_an_item_id", *_HOT),
    ),
    Operation(
        "post",
        "/v1/score",
        "score",
        "compatible",
        "Score items, in the shape of vLLM",
        rerank.ScoreAnswer,
        rerank.ScoreRequest,
        ("not_an_item_id", *_HOT),
    ),
    Operation(
        "get",
        "/v2",
        "kserve_server",
        "kserve",
        "Describe the server to KServe's clients",
        kserve.ServerMetadata,
    ),
    Operation(
        "get",
        "/v2/health/live",
        "kserve_live",
        "kserve",
        "Tell KServe's clients whether the process answers and its device works",
        kserve.Live,
        errors=("unavailable",),
        group="health",
    ),
    Operation(
        "get",
        "/v2/health/ready",
        "kserve_ready",
        "kserve",
        "Tell KServe's clients whether requests are served",
        kserve.Ready,
        errors=("unavailable",),
        group="health",
    ),
    *_kserve_model("", ""),
    *_kserve_model("/versions/{version}", "_version"),
    Operation(
        "get",
        "/v1/models",
        "list_models",
        "models",
        "List the models that are served, with their limits",
        api.ModelList,
    ),
    Operation(
        "get",
        "/v1/models/{name}",
        "get_model",
        "models",
        "Describe one model, with its limits",
        api.ModelInfo,
        errors=("not_found",),
    ),
    Operation(
        "post",
        "/v1/models/{name}/reload",
        "reload_model",
        "models",
        "Read the model's folder again and serve what is there now, without a pause",
        api.ModelInfo,
        errors=_CHANGE,
        admin=True,
        status=202,
    ),
    Operation(
        "delete",
        "/v1/models/{name}/reload",
        "cancel_reload",
        "models",
        "Cancel the model's reload or rollback, whose version does not serve yet",
        api.ModelInfo,
        errors=_CHANGE,
        admin=True,
        status=202,
    ),
    Operation(
        "post",
        "/v1/models/{name}/rollback",
        "roll_back_model",
        "models",
        "Serve the version of the model before this one again, without a pause",
        api.ModelInfo,
        errors=_CHANGE,
        admin=True,
        status=202,
    ),
    Operation(
        "get",
        "/v1/catalogs",
        "list_catalogs",
        "catalogs",
        "List the catalogs that the server holds, and say which one is served",
        catalog_api.CatalogList,
        errors=_NAMED,
        of_model=True,
    ),
    Operation(
        "post",
        "/v1/catalogs",
        "upload_catalog",
        "catalogs",
        "Upload a catalog, one line of JSON for each item, to be activated later",
        catalog_api.CatalogInfo,
        "application/x-ndjson",
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=201,
    ),
    Operation(
        "post",
        "/v1/catalogs/{version}/activate",
        "activate_catalog",
        "catalogs",
        "Serve an uploaded catalog, without a pause",
        catalog_api.CatalogInfo,
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=202,
    ),
    Operation(
        "delete",
        "/v1/catalogs/{version}/activate",
        "cancel_activation",
        "catalogs",
        "Cancel the activation of a catalog that does not serve yet",
        catalog_api.CatalogInfo,
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=202,
    ),
    Operation(
        "post",
        "/v1/catalogs/rollback",
        "roll_back_catalog",
        "catalogs",
        "Serve the catalog before the active one, without a pause",
        catalog_api.CatalogInfo,
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=202,
    ),
    Operation(
        "get",
        "/v1/items",
        "find_items",
        "catalogs",
        "Find items of the catalog by their ids or by words of their metadata, or list given ones",
        catalog_api.ItemList,
        errors=_NAMED,
        of_model=True,
        parameters=(
            Parameter(
                "item_id",
                "An item to list; it may be given several times, without a query. What the catalog lacks is left out.",
                {"type": "array", "items": {"type": "string"}, "maxItems": items.MAX_LISTED},
            ),
            Parameter(
                "query",
                "What an item's id begins with, or a text of its metadata has in it, whatever the case. Left out: any "
                "item.",
                {"type": "string", "maxLength": items.MAX_QUERY_CHARS, "default": ""},
            ),
            Parameter(
                "limit",
                "The most items to list.",
                {"type": "integer", "minimum": 1, "maximum": items.MAX_LISTED, "default": items.LISTED},
            ),
        ),
    ),
    Operation(
        "get",
        "/v1/items/{item_id}",
        "get_item",
        "catalogs",
        "Look up one item of the catalog",
        catalog_api.CatalogItem,
        errors=_NAMED,
        of_model=True,
    ),
    Operation(
        "delete",
        "/v1/users/{user_id}/cache",
        "forget_user",
        "users",
        "Erase all cache entries of a user",
        api.Erased,
        errors=("forbidden", *_NAMED),
        of_tenant=True,
    ),
    Operation(
        "get",
        "/health/live",
        "get_live",
        "server",
        "Tell whether the process answers and its device works",
        api.Health,
        errors=("unavailable",),
        group="health",
    ),
    Operation(
        "get",
        "/health/ready",
        "get_ready",
        "server",
        "Tell whether requests are served",
        api.Health,
        errors=("unavailable",),
        group="health",
    ),
    Operation(
        "get",
        "/metrics",
        "get_metrics",
        "server",
        "Read the metrics, in the format of Prometheus",
        "text/plain",
        group="metrics",
    ),
    Operation(
        "get",
        "/openapi.json",
        "get_openapi",
        "server",
        "Describe this API as an OpenAPI document",
        "application/json",
        group="docs",
    ),
    Operation(
        "get",
        "/docs",
        "get_docs",
        "server",
        "Show this API as a page, on which requests can be tried",
        "text/html",
        group="docs",
    ),
    Operation(
        "get",
        "/ui",
        "get_ui",
        "server",
        "Show a page that asks this server, draws its beams and watches its metrics",
        "text/html",
        group="ui",
    ),
)


def opened(config: ServerConfig) -> set[Group]:
    """What is answered without a key."""
    switches: dict[Group, bool] = {
        "health": config.open_health,
        "metrics": config.open_metrics,
        "docs": config.open_docs,
        "ui": config.open_ui,
    }
    return {group for group, is_open in switches.items() if is_open}


def open_paths(config: ServerConfig) -> Collection[str]:
    """The paths that are answered without a key."""
    groups = opened(config)
    paths = {operation.path for operation in OPERATIONS if operation.group in groups}
    pages: dict[Group, Collection[str]] = {"docs": docs_page.PATHS, "ui": (*ui_page.PATHS, "/")}
    return paths.union(*(pages.get(group, ()) for group in groups))
