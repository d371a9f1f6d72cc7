# SPDX-License-Identifier: Apache-2.0
"""The same good requests through every door, over HTTP and gRPC, and the scores that are right for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from benchmarks.hostile_requests import Call
from benchmarks.hostile_spellings import BEARER, KEY
from benchmarks.hostile_tensors import (
    ITEMS,
    JGR,
    RECOMMEND,
    TINY,
    Scores,
    binary,
    infer,
    of_message,
    of_outputs,
)
from benchmarks.hostile_world import HISTORY, SCORED_USER, Client, scores
from jgr.serving.http.kserve_grpc import SERVICE

PATIENCE_S = 60.0


def ask(
    channel: grpc.Channel,
    method: str,
    data: bytes,
    metadata: Sequence[tuple[str, str]],
    timeout_s: float | None = None,
) -> Any:
    return channel.unary_unary(f"/{SERVICE}/{method}").future(
        data, metadata=tuple(metadata), timeout=timeout_s
    )


def as_metadata(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def agreement(client: Client, channel: grpc.Channel) -> Iterator[tuple[str, Scores, Sequence[Scores]]]:
    """A door, its scores, and those that are right: of two layouts, either."""
    rank = {"candidates": ITEMS, "model": "tiny", **SCORED_USER}
    tiny = [scores(client.post("/v1/rank", rank))]
    of_jgr = {"model": "jgr", "history": HISTORY, "candidates": ["i4", "i5", "i6"], "user_id": "u"}
    jgr = [scores(client.post("/v1/rank", {**of_jgr, "layout": x})) for x in ("user_prefix", "item_prefix")]
    asked = {"model": "jgr", "history": HISTORY, "top_k": 2, "user_id": "u"}
    recommend = [scores(client.post("/v1/recommend", asked))]
    yield "explain tiny", scores(client.post("/v1/explain/rank", rank)["answer"]), tiny
    yield "explain jgr", scores(client.post("/v1/explain/rank", of_jgr)["answer"]), jgr
    yield "explain recommend", scores(client.post("/v1/explain/recommend", asked)["answer"]), recommend
    user = {"history": HISTORY, "user_id": "u"}
    for model, query, documents, right in (
        ("tiny", SCORED_USER, ITEMS, tiny),
        ("jgr", user, ["i4", "i5", "i6"], jgr),
    ):
        answer = client.post("/jgr/v1/rerank", {"model": model, "query": query, "documents": documents})
        yield (
            f"rerank {model}",
            {r["document"]["text"]: r["relevance_score"] for r in answer["results"]},
            right,
        )
        answer = client.post("/v1/score", {"model": model, "text_1": query, "text_2": documents})
        yield f"score {model}", {documents[s["index"]]: s["score"] for s in answer["data"]}, right
    for kind, version, values, right in (
        ("rank", "tiny", TINY, tiny), ("rank", "jgr", JGR, jgr[:1]), ("recommend", "", RECOMMEND, recommend),
    ):  # fmt: skip
        named = f"{kind} {version}"
        path = f"/v2/models/{kind}/versions/{version}/infer" if version else f"/v2/models/{kind}/infer"
        plain = [
            {"name": v.name, "datatype": v.datatype, "shape": [len(v.values)], "data": v.values}
            for v in values
        ]
        yield f"kserve {named}", of_outputs(client.post(path, {"inputs": plain})["outputs"]), right
        body, headers = binary(values)
        status, _, answer = client.ask(Call("POST", path, path, body, {**BEARER, **headers}))
        if status != 200:
            raise ValueError(f"{status}: {answer!r}")
        yield f"kserve binary {named}", of_outputs(json.loads(answer)["outputs"]), right
        for raw in (True, False):
            data = infer(kind, values, version, raw).SerializeToString()
            given = ask(channel, "ModelInfer", data, as_metadata(KEY)).result(PATIENCE_S)
            yield f"grpc {named} raw={raw}", of_message(given), right
