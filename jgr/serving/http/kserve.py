# SPDX-License-Identifier: Apache-2.0
"""KServe's Open Inference Protocol v2, with Triton's binary tensors: the requests of this server as tensors.

The one idea: there are two KServe models, `recommend` and `rank`, and their inputs are the fields of RecommendRequest
and RankRequest by the same names. So tensors become a dictionary that the struct validates, as it does a JSON body. A
KServe version is the name, or the exact version, of a served model.

A list is a tensor of one dimension, and so is a single value, of one element; a batch dimension of 1 in front is left
out. Ids are BYTES, or integers. jgr.serving.http.kserve_grpc has the same over gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from jgr import __version__
from jgr.serving.api import MAX_DEADLINE_MS, Answer, RankRequest, RecommendRequest, Request
from jgr.serving.errors import RequestError, invalid, quoted
from jgr.serving.http.decoding import UNREADABLE, in_words, refusal
from jgr.serving.http.kserve_inputs import INPUTS, Datatype, Input, Room
from jgr.serving.http.tensors import MAX_DIMENSIONS, Tensor, from_bytes, from_json, is_integral, to_bytes
from jgr.serving.policies.jobs import Kind
from jgr.serving.versions.served_models import Models, serves

JSON_BYTES = "Inference-Header-Content-Length"
"""The header that says how many bytes of a body are JSON; the binary tensors follow."""
BINARY_SIZE = "binary_data_size"
EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "jgr"
MAX_TENSORS = 64
MAX_NAME_CHARS = 256
TENSOR_NAME = r"^[a-z_]{1,64}\Z"

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Shape = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_DIMENSIONS)]
Parameters = Annotated[dict[Name, str | int | float | bool | None], Meta(max_length=MAX_TENSORS)]
Elements = Annotated[list[Any], Meta(extra_json_schema={"items": {}})]

_encode = msgspec.json.Encoder().encode


class InferTensor(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One input of a KServe model."""

    name: Annotated[
        str,
        Meta(pattern=TENSOR_NAME, description="Name of the input: a field of /v1/recommend or /v1/rank."),
    ]
    shape: Annotated[Shape, Meta(description="Number of elements in each dimension.")]
    datatype: Annotated[Datatype, Meta(description="Type of the elements.")]
    parameters: Annotated[
        Parameters,
        Meta(
            description="binary_data_size: how many bytes behind the JSON are the input's, in place of data."
        ),
    ] = field(default_factory=dict)
    data: Annotated[  # read by its shape and datatype: lists in lists take the longest to make of all JSON
        Raw,
        Meta(
            description="The elements, flat or nested as the shape. null: they are binary.",
            extra_json_schema={
                "anyOf": [{"items": {}, "type": "array"}, {"type": "null"}],
                "default": None,
            },
        ),
    ] = field(default_factory=Raw)


class InferOutput(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One output that is asked for."""

    name: Annotated[Name, Meta(description="Name of the output.")]
    parameters: Annotated[
        Parameters, Meta(description="binary_data: whether the output comes as bytes behind the JSON.")
    ] = field(default_factory=dict)


class InferRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Asks a KServe model, `recommend` or `rank`, which describe their inputs at /v2/models/{name}."""

    inputs: Annotated[
        list[InferTensor], Meta(min_length=1, max_length=MAX_TENSORS, description="The inputs, by name.")
    ]
    id: Annotated[Name, Meta(description="An id that the answer repeats.")] = ""
    parameters: Annotated[
        Parameters,
        Meta(
            description="timeout: the deadline in microseconds. priority: above 1 is priority batch. "
            "binary_data_output: whether outputs come as bytes. Others are ignored."
        ),
    ] = field(default_factory=dict)
    outputs: Annotated[
        list[InferOutput],
        Meta(max_length=MAX_TENSORS, description="The outputs that are wanted; none: item_ids and scores."),
    ] = field(default_factory=list)


class OutputTensor(Struct, kw_only=True):
    """One output of a KServe model."""

    name: Annotated[str, Meta(description="Name of the output.")]
    datatype: Annotated[Datatype, Meta(description="Type of the elements.")]
    shape: Annotated[list[int], Meta(description="Number of elements in each dimension.")]
    parameters: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="binary_data_size: how many bytes behind the JSON are the output's."),
    ] = UNSET
    data: Annotated[Elements | UnsetType, Meta(description="The elements; absent where they are binary.")] = (
        UNSET
    )


class InferAnswer(Struct, kw_only=True):
    """The outputs of a KServe model."""

    model_name: Annotated[str, Meta(description="The KServe model: recommend or rank.")]
    model_version: Annotated[str, Meta(description="Version of the model that computed the scores.")]
    id: Annotated[str | UnsetType, Meta(description="The request's id, where it had one.")] = UNSET
    parameters: Annotated[
        dict[str, Any], Meta(description="catalog_version, and usage: prompt_tokens and cached_tokens.")
    ]
    outputs: Annotated[list[OutputTensor], Meta(description="The outputs, in the order asked for.")]


class Live(Struct, kw_only=True):
    """Whether the process answers."""

    live: Annotated[bool, Meta(description="Always true.")]


class Ready(Struct, kw_only=True):
    """Whether requests are served; a server that is not ready answers with an error."""

    ready: Annotated[bool, Meta(description="Always true.")]


class ModelReady(Struct, kw_only=True):
    """Whether a KServe model serves; one that is not ready answers with an error."""

    name: Annotated[str, Meta(description="The KServe model: recommend or rank.")]
    ready: Annotated[bool, Meta(description="Always true.")]


class ServerMetadata(Struct, kw_only=True):
    """What the server is."""

    name: Annotated[str, Meta(description="jgr.")]
    version: Annotated[str, Meta(description="The version of jgr.")]
    extensions: Annotated[list[str], Meta(description="Extensions of the protocol that are there.")]


class TensorMetadata(Struct, kw_only=True):
    """One input or output of a KServe model."""

    name: Annotated[str, Meta(description="Name of the tensor.")]
    datatype: Annotated[Datatype, Meta(description="Type of the elements.")]
    shape: Annotated[list[int], Meta(description="Number of elements in each dimension; -1: any.")]


class ModelMetadata(Struct, kw_only=True):
    """What a KServe model takes and gives. Inputs after `history`, and after `candidates` of rank, are optional."""

    name: Annotated[str, Meta(description="The KServe model: recommend or rank.")]
    versions: Annotated[list[str], Meta(description="Versions of the served models that answer it.")]
    platform: Annotated[str, Meta(description="jgr.")]
    inputs: Annotated[list[TensorMetadata], Meta(description="The inputs.")]
    outputs: Annotated[
        list[TensorMetadata], Meta(description="The outputs; metadata comes only where it is asked for.")
    ]


OUTPUTS: Mapping[str, Datatype] = {"item_ids": "BYTES", "scores": "FP32", "metadata": "BYTES"}
DEFAULT_OUTPUTS = ("item_ids", "scores")
_TYPES: Mapping[Kind, type[RecommendRequest] | type[RankRequest]] = {
    "recommend": RecommendRequest,
    "rank": RankRequest,
}
_infer = msgspec.json.Decoder(InferRequest)
_numbers = msgspec.json.Decoder(dict[str, int | float] | None)
"""Reads what is JSON in a tensor: numbers by their names, as `context` and `task_weights` are."""


@dataclass(frozen=True)
class Given:
    """A request as it came, by HTTP or by gRPC."""

    id: str
    parameters: Mapping[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[InferOutput]


class HttpAnswer(NamedTuple):
    """The body of an answer. json_bytes: how many of its bytes are JSON; None: all."""

    body: bytes
    json_bytes: int | None
    media_type: str


@dataclass(frozen=True)
class Asked:
    """What is asked of an engine, and how its answer is wanted. kind: the KServe model."""

    kind: Kind
    request: Request
    id: str
    outputs: Sequence[tuple[str, bool]]
    """Names, and whether each comes as bytes."""

    def tensors(self, answer: Answer) -> list[tuple[str, Datatype, list[Any], bool]]:
        """Name, datatype, elements of each output, and whether it comes as bytes."""
        made: dict[str, Callable[[], list[Any]]] = {
            "item_ids": lambda: [item.item_id for item in answer.items],
            "scores": lambda: [item.score for item in answer.items],
            "metadata": lambda: [_encode(item.metadata).decode() for item in answer.items],
        }
        return [(name, OUTPUTS[name], made[name](), binary) for name, binary in self.outputs]

    def parameters(self, answer: Answer) -> dict[str, str | int]:
        return {
            "catalog_version": answer.catalog_version,
            "prompt_tokens": answer.usage.prompt_tokens,
            "cached_tokens": answer.usage.cached_tokens,
        }

    def encode_http(self, answer: Answer) -> HttpAnswer:
        outputs, blobs = [], []
        for name, datatype, values, binary in self.tensors(answer):
            output = OutputTensor(name=name, datatype=datatype, shape=[len(values)])
            if binary:
                blobs.append(to_bytes(datatype, values))
                output.parameters = {BINARY_SIZE: len(blobs[-1])}
            else:
                output.data = values
            outputs.append(output)
        head = _encode(
            InferAnswer(
                model_name=self.kind,
                model_version=answer.model,
                id=self.id or UNSET,
                parameters=self.parameters(answer),
                outputs=outputs,
            )
        )
        if not blobs:
            return HttpAnswer(head, None, "application/json")
        return HttpAnswer(b"".join([head, *blobs]), len(head), "application/octet-stream")


def kind_of(name: str) -> Kind:
    """The kind of requests that a KServe model takes. Raises RequestError where there is no such model."""
    if name not in INPUTS:
        raise RequestError(
            "not_found",
            f"there is no model {quoted(name)}; there are {', '.join(map(repr, INPUTS))}",
            "model_name",
        )
    return cast(Kind, name)


def room(models: Models, kind: Kind) -> Room:
    """The room of a request of that kind. Raises RequestError where no model serves it."""
    infos = [info for info in models.infos if serves(info, kind)]
    if not infos:
        models.engine(None, kind)  # which says so
    return Room(kind, infos)


def read_http(body: bytes, json_bytes: str | None, room: Room) -> Given:
    """The body of an infer request. json_bytes: the header JSON_BYTES. Raises RequestError, which names the field."""
    size = len(body)
    if json_bytes is not None:
        if not (json_bytes.isascii() and json_bytes.isdigit() and len(json_bytes) < 16):
            raise invalid(JSON_BYTES, f"{JSON_BYTES}: {quoted(json_bytes)} is no number of bytes")
        size = int(json_bytes)
        if size > len(body):
            raise invalid(JSON_BYTES, f"{JSON_BYTES} is {size}; the body has only {len(body)} bytes")
    head = body[:size]
    try:
        given = _infer.decode(head)
    except UNREADABLE as error:
        raise refusal(error, head, InferRequest) from None
    blobs, at = memoryview(body), size
    inputs = []
    for tensor in given.inputs:
        room.admit(tensor.name, tensor.shape)
        length, has_data = tensor.parameters.get(BINARY_SIZE), bytes(tensor.data) not in (b"", b"null")
        if length is None:
            if not has_data:
                raise invalid(tensor.name, f"{tensor.name}: has neither data nor {BINARY_SIZE}")
            inputs.append(from_json(tensor.name, tensor.datatype, tensor.shape, tensor.data))
            continue
        if type(length) is not int or not 0 <= length <= len(body) - at or has_data:
            raise invalid(
                tensor.name,
                f"{tensor.name}: {BINARY_SIZE} must be a number of bytes that are there, in place of data",
            )
        inputs.append(from_bytes(tensor.name, tensor.datatype, tensor.shape, blobs[at : at + length]))
        at += length
    if at != len(body):
        raise invalid("inputs", f"inputs: {len(body) - at} bytes of the body belong to no input")
    return Given(given.id, given.parameters, inputs, given.outputs)


def asked(kind: Kind, version: str, given: Given, deadline_ms: float | None = None) -> Asked:
    """The request that tensors mean. version: of the KServe model; "": none is named. deadline_ms: what is left of the
    caller's own deadline. Raises RequestError, which names the tensor."""
    fields = _fields(kind, given)
    fields.setdefault("deadline_ms", _deadline_ms(given.parameters, deadline_ms))
    fields.setdefault("priority", _priority(given.parameters))
    outputs = _outputs(given)
    fields["include_metadata"] = any(name == "metadata" for name, _ in outputs)
    if version:
        fields["model"] = version
    wanted = _TYPES[kind]
    try:
        request = msgspec.convert(fields, wanted)
    except msgspec.ValidationError as error:
        refused = refusal(error, b"", wanted)
        # What is inside `filters` is an input of its own here.
        refused.message = refused.message.removeprefix("filters.")
        refused.field = refused.field and refused.field.removeprefix("filters.")
        raise refused from None
    return Asked(kind, request, given.id, outputs)


def _fields(kind: Kind, given: Given) -> dict[str, Any]:
    """The fields of a request, by the names of its inputs, which a Room has admitted."""
    fields: dict[str, Any] = {}
    for tensor in given.inputs:
        known = INPUTS[kind][tensor.name]
        into = fields.setdefault(known.inside, {}) if known.inside else fields
        into[tensor.name] = _value(known, tensor)
    return fields


def _value(known: Input, tensor: Tensor) -> Any:
    name, datatype = known.name, tensor.datatype
    fits = {
        "id": datatype == "BYTES" or is_integral(datatype),
        "text": datatype == "BYTES",
        "json": datatype == "BYTES",
        "integer": is_integral(datatype),
        "number": is_integral(datatype) or datatype.startswith("FP"),
        "boolean": datatype == "BOOL",
    }
    if not fits[known.takes]:
        raise invalid(name, f"{name}: must be {known.datatype}, not {datatype}")
    if not known.one:
        return tensor.values
    (value,) = tensor.values
    if known.takes == "json":
        try:
            return _numbers.decode(value)
        except msgspec.ValidationError as error:
            raise invalid(name, f"{name}: {in_words(str(error).partition(' - at ')[0])}") from None
        except UNREADABLE as error:
            raise invalid(name, f"{name}: is not JSON: {error}") from None
    if known.takes == "number" and not math.isfinite(value):
        raise invalid(name, f"{name} must be a finite number")
    return value


def _deadline_ms(parameters: Mapping[str, Any], own_ms: float | None) -> float | None:
    """The deadline of a request without an input of that name: the nearer one of the parameter's and the caller's."""
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or timeout_us < 0:
        raise invalid(
            "parameters.timeout", "parameters.timeout: must be a whole number of microseconds, 0 or more"
        )
    timeout_ms = min(timeout_us, MAX_DEADLINE_MS * 1000) / 1000  # JSON has integers beyond every float
    found = [ms for ms in (timeout_ms or None, own_ms) if ms is not None]
    return min(*found, MAX_DEADLINE_MS) if found else None


def _priority(parameters: Mapping[str, Any]) -> str:
    """Triton's priorities count from 1, the highest; 0 is none."""
    priority = parameters.get("priority", 0)
    if type(priority) is not int or priority < 0:
        raise invalid("parameters.priority", "parameters.priority: must be a whole number, 0 or more")
    return "batch" if priority > 1 else "interactive"


def _outputs(given: Given) -> list[tuple[str, bool]]:
    """The names of the outputs that are wanted, and whether each comes as bytes."""
    usual = _flag(given.parameters, "binary_data_output", "parameters", False)
    if not given.outputs:
        return [(name, usual) for name in DEFAULT_OUTPUTS]
    wanted: dict[str, bool] = {}
    for at, output in enumerate(given.outputs):
        place = f"outputs[{at}]"
        if output.name not in OUTPUTS or output.name in wanted:
            there = ", ".join(OUTPUTS)
            raise invalid(f"{place}.name", f"{place}.name: must be one of {there}, each once")
        if output.parameters.get("classification"):
            raise invalid(f"{place}.parameters", f"{place}.parameters: there are no classifications here")
        wanted[output.name] = _flag(output.parameters, "binary_data", f"{place}.parameters", usual)
    return list(wanted.items())


def _flag(parameters: Mapping[str, Any], name: str, place: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise invalid(f"{place}.{name}", f"{place}.{name}: must be true or false")
    return value


def server_metadata() -> ServerMetadata:
    return ServerMetadata(name="jgr", version=__version__, extensions=list(EXTENSIONS))


def model_metadata(models: Models, name: str, version: str) -> ModelMetadata:
    """What a KServe model takes. Raises RequestError where there is none of that name and version."""
    kind = kind_of(name)
    if version:
        versions = [models.engine(version, kind).info.version]
    else:
        models.engine(None, kind)  # refuses a kind that nothing serves
        versions = [info.version for info in models.infos if serves(info, kind)]
    return ModelMetadata(
        name=name,
        versions=versions,
        platform=PLATFORM,
        inputs=[
            TensorMetadata(name=each.name, datatype=each.datatype, shape=[1 if each.one else -1])
            for each in INPUTS[kind].values()
        ],
        outputs=[
            TensorMetadata(name=output, datatype=datatype, shape=[-1]) for output, datatype in OUTPUTS.items()
        ],
    )


def require_ready(models: Models, name: str, version: str) -> None:
    """Raise RequestError unless the KServe model of that name and version serves."""
    status = "draining" if models.draining else models.engine(version or None, kind_of(name)).status
    if status != "ready":
        raise RequestError("unavailable", f"the model is {status}")
