# SPDX-License-Identifier: Apache-2.0
"""Requests of KServe's protocol as bytes: binary tensors over HTTP, messages over gRPC, good ones and broken ones.

All is drawn from one seeded generator, so a request that found a fault can be made again.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.hostile_requests import NUMBERS, TEXTS, mutated
from benchmarks.hostile_world import HISTORY, SCORED_USER
from jgr.serving.http.kserve import BINARY_SIZE, JSON_BYTES
from jgr.serving.http.kserve_grpc import CONTENTS, message_class
from jgr.serving.http.kserve_inputs import INPUTS

METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")
DATATYPES = (*CONTENTS, "FP16", "", "STRING", "bytes")
SIZES = (-(2**63), -1, 0, 1, 2, 3, 7, 1 << 20, 2**31 - 1, 2**31, 2**63 - 1)
WIDTHS = {"BOOL": "?", "INT32": "<i", "INT64": "<q", "FP32": "<f", "FP64": "<d"}


class Value(NamedTuple):
    """A tensor of one dimension."""

    name: str
    datatype: str
    values: Sequence[Any]


ITEMS = ["B005", "B006", "B007", "B008"]
TINY = (
    Value("history", "BYTES", SCORED_USER["history"]),
    Value("candidates", "BYTES", ITEMS),
    Value("history_times", "INT64", SCORED_USER["history_times"]),
    Value("history_actions", "INT64", SCORED_USER["history_actions"]),
    Value("context", "BYTES", [json.dumps(SCORED_USER["context"])]),
    Value("time", "INT64", [SCORED_USER["time"]]),
)
JGR = (
    Value("history", "BYTES", HISTORY),
    Value("candidates", "BYTES", ["i4", "i5", "i6"]),
    Value("layout", "BYTES", ["user_prefix"]),
    Value("user_id", "BYTES", ["u"]),
)
RECOMMEND = (
    Value("history", "BYTES", HISTORY),
    Value("top_k", "INT32", [2]),
    Value("user_id", "BYTES", ["u"]),
)
BODIES = (
    TINY,
    JGR,
    RECOMMEND,
    (*RECOMMEND, Value("exclude_history", "BOOL", [True]), Value("deadline_ms", "FP64", [6e4])),
    # What these models do not read, and say so: texts of a history, and how much of a prompt may be approximated.
    (
        *JGR,
        Value("reuse_budget", "FP32", [0.5]),
        Value("history_texts", "BYTES", ["worn out"] * len(HISTORY)),
    ),
)
"""Requests of both models, all but the last of them good."""
Scores = Mapping[str, float]


class Message(NamedTuple):
    """A call over gRPC."""

    method: str
    data: bytes
    metadata: tuple[tuple[str, str], ...] = ()


def packed(value: Value) -> bytes:
    """The binary form of a tensor."""
    if value.datatype == "BYTES":
        texts = [str(each).encode() for each in value.values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return b"".join(struct.pack(WIDTHS[value.datatype], each) for each in value.values)


def binary(values: Sequence[Value], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A body with binary tensors, and its headers."""
    blobs = [packed(value) for value in values]
    inputs = [
        {"name": v.name, "datatype": v.datatype, "shape": [len(v.values)], "parameters": {BINARY_SIZE: len(b)}}
        for v, b in zip(values, blobs, strict=True)
    ]  # fmt: skip
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + b"".join(blobs), {JSON_BYTES: str(len(head))}


def infer(model: str, values: Sequence[Value], version: str = "", raw: bool = False) -> Any:
    """A ModelInferRequest."""
    request = message_class("ModelInferRequest")(model_name=model, model_version=version)
    for value in values:
        tensor = request.inputs.add(name=value.name, datatype=value.datatype, shape=[len(value.values)])
        if raw:
            request.raw_input_contents.append(packed(value))
        else:
            texts = (
                [str(each).encode() for each in value.values] if value.datatype == "BYTES" else value.values
            )
            getattr(tensor.contents, CONTENTS[value.datatype]).extend(texts)
    return request


def broken_body(values: Sequence[Value], rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """Binary tensors over HTTP with something broken: sizes, shapes, datatypes, bytes, the header, or nothing."""
    body, headers = binary(values, **rng.choice(({}, {}, {"parameters": {"binary_data_output": True}})))
    at = int(headers[JSON_BYTES])
    head, blob = json.loads(body[:at]), bytearray(body[at:])
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        tensor, how = rng.choice(head["inputs"]), rng.randrange(7)
        if how == 0:
            tensor["parameters"][BINARY_SIZE] = rng.choice(
                (*SIZES, *NUMBERS, "4", None, True, [4], len(blob) + 1)
            )
        elif how == 1:
            tensor["shape"] = rng.choice(
                ([], [rng.choice(SIZES)], [rng.choice(SIZES)] * 9, [1, 1, 3], None, [0.5])
            )
        elif how == 2:
            tensor["datatype"] = rng.choice(DATATYPES)
        elif how == 3 and blob:
            blob[rng.randrange(len(blob))] = rng.randrange(256)
        elif how == 4:
            blob = blob[: rng.randrange(len(blob) + 1)] + bytes(rng.randrange(3) * 4)
        elif how == 5:
            tensor["name"] = rng.choice((*INPUTS["rank"], *INPUTS["recommend"], *TEXTS))
        else:
            head["inputs"].append(dict(tensor))
    if rng.random() < 0.15:
        head = mutated(head, rng)
    text = json.dumps(head).encode()
    size: Any = len(text)
    if rng.random() < 0.15:
        size = rng.choice(
            (size + 1, size - 1, 0, -1, 2**63, "x", "", "+5", "1e3", "\xb2", len(text) + len(blob))
        )
    return text + bytes(blob), {} if rng.random() < 0.03 else {JSON_BYTES: str(size)}


def broken_message(good: Sequence[Any], rng: random.Random) -> Message:
    """A message of any method: fields changed, bytes changed, cut, another method's, or as it was."""
    request = type(rng.choice(good))()
    request.CopyFrom(rng.choice(good))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        _break_field(request, rng)
    data = bytearray(request.SerializeToString())
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]
    method = (
        "ModelInfer"
        if rng.random() < 0.8
        else rng.choice((*METHODS, "ModelStreamInfer", "", "ServerReflectionInfo"))
    )
    if method in ("ModelReady", "ModelMetadata") and rng.random() < 0.8:
        names = ("rank", "recommend", "jgr", "", "x" * 5_000, "é")
        data = bytearray(
            message_class(f"{method}Request")(
                name=rng.choice(names), version=rng.choice(names)
            ).SerializeToString()
        )
    return Message(method, bytes(data), tuple(_metadata(rng)))


def _break_field(request: Any, rng: random.Random) -> None:
    tensor, how = rng.choice(request.inputs) if request.inputs else request.inputs.add(), rng.randrange(14)
    text = (
        rng.choice([t for t in TEXTS if t.isprintable() or t in ("\x00", "\n")])
        .encode("utf-8", "replace")
        .decode()
    )
    if how == 0:
        tensor.shape[:] = [rng.choice(SIZES) for _ in range(rng.choice((0, 1, 1, 2, 9)))]
    elif how == 1:
        tensor.datatype = rng.choice(DATATYPES)
    elif how == 2:
        tensor.name = rng.choice((*INPUTS["rank"], *INPUTS["recommend"], text))
    elif how == 3:
        field = rng.choice(list(CONTENTS.values()))
        bound = {"int_contents": 2**31 - 1, "uint_contents": 2**32 - 1, "int64_contents": 2**63 - 1}
        odd: Mapping[str, Sequence[Any]] = {
            "bytes_contents": [b"\xff", b"", b"i4"],
            "bool_contents": [True, False],
        }
        values = odd.get(field, [0, 1, bound.get(field, 2**31)])
        if field.startswith("fp"):
            values = [float("nan"), float("inf"), -0.0, 1e30]
        getattr(tensor.contents, field).extend(rng.choice(values) for _ in range(rng.choice((1, 2, 500))))
    elif how == 4:
        tensor.ClearField(rng.choice(("contents", "shape", "datatype", "name")))
    elif how == 5:
        request.raw_input_contents.append(
            rng.choice((b"", b"\xff" * 7, b"\0\0\0\0" * 2_000, struct.pack("<I", 2**32 - 1)))
        )
    elif how == 6:
        del request.raw_input_contents[:]
    elif how == 7:
        request.model_name = rng.choice(("rank", "recommend", text, "x" * 100_000))
    elif how == 8:
        request.model_version = rng.choice(("jgr", "tiny", text, "y" * 300))
    elif how == 9:
        request.id = rng.choice((text, "z" * 300))
    elif how == 10:
        request.inputs.add().CopyFrom(tensor)
    elif how == 11:
        request.outputs.add(name=rng.choice(("scores", "metadata", "item_ids", text)))
    elif how == 12:
        parameter = request.parameters[rng.choice(("timeout", "priority", "binary_data_output", text))]
        kind = rng.choice(("bool_param", "int64_param", "string_param", "double_param", "uint64_param"))
        given: Mapping[str, Any] = {
            "bool_param": True, "int64_param": rng.choice((-1, 0, 5, 10**9, 2**63 - 1)), "string_param": text,
            "double_param": float("nan"), "uint64_param": 2**64 - 1,
        }  # fmt: skip
        setattr(parameter, kind, given[kind])
    else:
        del request.inputs[rng.randrange(len(request.inputs)) :]


def _metadata(rng: random.Random) -> Sequence[tuple[str, str]]:
    if rng.random() < 0.8:
        return ()
    return rng.choice((
        (("x-request-id", rng.choice(("r1", "r" * 200, " a b "))),),
        (("x-request-id", "r1"), ("x-request-id", "r2")),
        (("traceparent", "00-" + "f" * 32 + "-" + "0" * 16 + "-ff"),),
        (("x-long", "y" * 5_000),),
        (("grpc-timeout", "1n"),),
    ))  # fmt: skip


def of_outputs(outputs: Sequence[Mapping[str, Any]]) -> Scores:
    found = {output["name"]: output["data"] for output in outputs}
    return dict(zip(found["item_ids"], found["scores"], strict=True))


def of_message(data: bytes) -> Scores:
    answer = message_class("ModelInferResponse").FromString(data)
    if answer.raw_output_contents:
        texts, numbers = answer.raw_output_contents
        items, at = [], 0
        while at < len(texts):
            end = at + 4 + int.from_bytes(texts[at : at + 4], "little")
            items.append(texts[at + 4 : end].decode())
            at = end
        return dict(zip(items, memoryview(numbers).cast("f").tolist(), strict=True))
    ids, given = answer.outputs[0].contents.bytes_contents, answer.outputs[1].contents.fp32_contents
    return dict(zip((each.decode() for each in ids), given, strict=True))
