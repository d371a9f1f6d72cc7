# SPDX-License-Identifier: Apache-2.0
"""KServe's gRPC service over the same engines: `server.grpc_port`, with the extra jgr[grpc].

The one idea: a message becomes the same `Given` as a body over HTTP, so models, tensors, checks and answers are those
of `jgr.serving.http.kserve`. The key is the metadata `authorization`, the deadline the call's own, and an error has a
status code, with its stable name, field and request id in the trailing metadata. A call that ends early is cancelled.

The messages are in a descriptor pool of their own: a process may hold Triton's client too, whose messages have the same
names.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from pathlib import Path
from random import getrandbits
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jgr.config import ServerConfig, UserError
from jgr.serving.api import MAX_DEADLINE_MS, Answer
from jgr.serving.errors import STATUS, ErrorType, RequestError, invalid, quoted
from jgr.serving.http import kserve
from jgr.serving.http.keys import ANYBODY, Caller
from jgr.serving.http.kserve_inputs import Room
from jgr.serving.http.refusals import TRY_AGAIN
from jgr.serving.http.server import CLIENT_GONE, App, Call, Departure
from jgr.serving.http.tensors import (
    MAX_DIMENSIONS,
    NUMBERS,
    TEXT,
    Tensor,
    from_bytes,
    from_values,
    require_count,
    text,
    to_bytes,
)

SERVICE = "inference.GRPCInferenceService"
HEALTH = ("ServerLive", "ServerReady")
CODES: dict[ErrorType, grpc.StatusCode] = {
    "invalid_http": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_json": grpc.StatusCode.INVALID_ARGUMENT,
    "not_an_item_id": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthorized": grpc.StatusCode.UNAUTHENTICATED,
    "forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "method_not_allowed": grpc.StatusCode.UNIMPLEMENTED,
    "conflict": grpc.StatusCode.FAILED_PRECONDITION,
    "body_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "head_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "quota_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "internal": grpc.StatusCode.INTERNAL,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
}
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of InferTensorContents for each datatype; FP16 comes raw only."""
TRACED = "ModelInfer"
MAX_METADATA_BYTES = 1 << 16
MAX_MESSAGE_CHARS = 500
IDLE_MS = 300_000
AGE_MS = 600_000
"""After which a connection takes no more calls: a client that never takes its answers would hold them for ever."""
KEEPALIVE_MS = 60_000
MAX_PENDING = 1 << 14
"""Calls that gRPC takes before this process looks at them. By its own limits, 1,000 and 3,000, it ends calls of a burst
as cancelled, without a word of why."""
WATCH_S, ENDING_S = 0.2, 5.0
_LOGGERS = ("asyncio", "grpc._cython.cygrpc")

_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


def _messages() -> Callable[[str], Any]:
    """The class of a message of kserve.proto, by its name."""
    pool = descriptor_pool.DescriptorPool()
    described = files("jgr.serving.http").joinpath("kserve.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))


message_class = _messages()
_Response = message_class("ModelInferResponse")

Method = Callable[[Any, Call, float | None], Awaitable[Any]]
"""Answers a message. Its last argument is what is left of the call's deadline, in milliseconds."""


class GrpcServer:
    """The service on a port of its own. `start` and `stop` belong to the event loop; port: where it listens, then.

    connections: the most at a time, and the most calls. read_timeout_s: in which a call's message must arrive.

    A call whose path is no UTF-8 ends gRPC's own loop, which nothing here can keep from it. So it is watched, and begun
    again on the same port; calls that run end in what is left of the old one.
    """

    def __init__(self, app: App, config: ServerConfig, connections: int, read_timeout_s: float) -> None:
        self._app, self._config, self._models = app, config, app.models
        self._connections, self._read_timeout_s = connections, read_timeout_s
        self.port = 0
        self._server: grpc.aio.Server
        self._watching: asyncio.Task[None]
        self._ending: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises UserError where the address cannot be used."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_is_of_no_client)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            self._server = self._made(f"{host}:{self._config.grpc_port or 0}")
        except RuntimeError:
            raise UserError(
                f"server.host, server.grpc_port: cannot listen on {host}:{self._config.grpc_port}"
            ) from None
        await self._server.start()
        self._watching = asyncio.create_task(self._watch(f"{host}:{self.port}"))
        _log.info("gRPC: listening on %s:%d", host, self.port)

    def _made(self, address: str) -> grpc.aio.Server:
        """A server that listens, and does not serve yet. Raises RuntimeError where the address cannot be used."""
        server = grpc.aio.server(
            maximum_concurrent_rpcs=self._connections,
            options=[
                ("grpc.so_reuseport", 0),  # two servers would share the port's calls
                ("grpc.max_receive_message_length", self._config.max_body_bytes),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_allowed_incoming_connections", self._connections),
                ("grpc.server.max_pending_requests", MAX_PENDING),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
                ("grpc.server_handshake_timeout_ms", int(self._read_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                ("grpc.max_connection_age_ms", AGE_MS),
                ("grpc.max_connection_age_grace_ms", MAX_DEADLINE_MS),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ],
        )
        methods: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {name: self._handler(name, method) for name, method in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        if self._config.tls_certificate:
            paths = self._config.tls_key, self._config.tls_certificate
            key, certificate = (Path(path).read_bytes() for path in paths)
            self.port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        else:
            self.port = server.add_insecure_port(address)
        return server

    async def _watch(self, address: str) -> None:
        while True:
            try:
                while await self._server.wait_for_termination(WATCH_S):
                    pass
                return
            except Exception as error:
                _log.error("gRPC ended by itself, and is begun again: %s", error)
            ending = asyncio.create_task(self._server.stop(ENDING_S))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            while True:
                try:
                    self._server = self._made(address)
                    break
                except (RuntimeError, OSError) as error:
                    _log.error("gRPC cannot listen on %s: %s", address, error)
                    await asyncio.sleep(WATCH_S)
            await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and cancel those that have not ended after `grace_s` seconds."""
        self._watching.cancel()
        await asyncio.gather(self._server.stop(grace_s), *self._ending)

    def _handler(self, name: str, method: Method) -> Any:
        request_class, endpoint = message_class(f"{name}Request"), f"/{SERVICE}/{name}"
        app = self._app
        find = _anybody if name in HEALTH and self._config.open_health else app.keys.client
        traces = app.traces if name == TRACED else None

        async def handle(messages: Any, context: Any) -> bytes:
            # What is left counts from the arrival on, as a deadline_ms does.
            arrival_ns, left_s = app.clock(), context.time_remaining()
            metadata = context.invocation_metadata() or ()
            key, request_id = _metadata(metadata)
            trace = None if traces is None else traces.begin(arrival_ns, _headers(metadata), endpoint)
            status, failed, encoded = CLIENT_GONE, None, b""
            try:
                caller = app.admit(find, key, arrival_ns)  # before anything of the message is read
                given = await self._message(request_class, context)
                call = Call(Departure(), request_id, arrival_ns, caller, trace)
                answer = await method(given, call, None if left_s is None else max(left_s, 1e-6) * 1e3)
                encoded = answer.SerializeToString()
                status = 200
            except RequestError as error:
                failed = error.with_traceback(None)  # which leads to this frame, and so to itself
            except Exception as error:
                _log.error("request %s failed", request_id, exc_info=error)
                failed = RequestError("internal", "the server failed; see its log")
            finally:
                status = status if failed is None else STATUS[failed.type]
                app.count(endpoint, status)
                if app.access is not None and not (name in HEALTH and status == 200):
                    scope = {**_client(context), "method": "GRPC", "path": endpoint}
                    app.access(scope, status, len(encoded), (app.clock() - arrival_ns) / 1e6, request_id)
                if trace is not None:
                    trace.end(status, request_id)
            told = [("x-request-id", request_id)]
            if trace is not None:
                told.append(("traceresponse", trace.header().decode()))
            if failed is not None:
                message = failed.message[:MAX_MESSAGE_CHARS]  # it is a header, of which clients take 8 KiB
                await context.abort(CODES[failed.type], message, (*told, *_trailing(failed)))
            context.set_trailing_metadata(tuple(told))
            return encoded

        # A call of one message looks the same as one of a stream; but here the key is known before it is read, and a
        # client that does not send it is not waited for.
        return grpc.stream_unary_rpc_method_handler(handle)

    async def _message(self, request_class: Any, context: Any) -> Any:
        """The message of a call. Raises RequestError where there is none, or another."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                data = await context.read()
        except TimeoutError:
            raise RequestError(
                "invalid_http", f"the message did not arrive within {self._read_timeout_s:g} s"
            ) from None
        if data is grpc.aio.EOF:
            raise RequestError("invalid_http", "the call has no message")
        try:
            return request_class.FromString(data)
        except message.DecodeError:
            raise RequestError(
                "invalid_request", f"the message is no {request_class.DESCRIPTOR.name}"
            ) from None

    async def _live(self, given: Any, call: Call, left_ms: float | None) -> Any:
        return message_class("ServerLiveResponse")(live=not self._models.broken)

    async def _ready(self, given: Any, call: Call, left_ms: float | None) -> Any:
        return message_class("ServerReadyResponse")(ready=not self._models.waiting)

    async def _server_metadata(self, given: Any, call: Call, left_ms: float | None) -> Any:
        found = kserve.server_metadata()
        return message_class("ServerMetadataResponse")(
            name=found.name, version=found.version, extensions=found.extensions
        )

    async def _model_ready(self, given: Any, call: Call, left_ms: float | None) -> Any:
        engine = self._models.engine(given.version or None, kserve.kind_of(given.name))
        return message_class("ModelReadyResponse")(
            ready=engine.status == "ready" and not self._models.draining
        )

    async def _model_metadata(self, given: Any, call: Call, left_ms: float | None) -> Any:
        found = kserve.model_metadata(self._models, given.name, given.version)
        response = message_class("ModelMetadataResponse")(
            name=found.name, versions=found.versions, platform=found.platform
        )
        for into, tensors in ((response.inputs, found.inputs), (response.outputs, found.outputs)):
            for tensor in tensors:
                into.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        return response

    async def _infer(self, given: Any, call: Call, left_ms: float | None) -> Any:
        kind = kserve.kind_of(given.model_name)
        asked = kserve.asked(kind, given.model_version, read(given, kserve.room(self._models, kind)), left_ms)
        raw = bool(given.raw_input_contents)
        return await self._app.answer(
            self._models.engine(asked.request.model, kind),
            asked.request,
            call,
            lambda answer: encoded_answer(asked, answer, raw),
        )


def read(given: Any, room: Room) -> kserve.Given:
    """A ModelInferRequest as what HTTP would carry. Raises RequestError, which names the field."""
    if not 0 < len(given.inputs) <= kserve.MAX_TENSORS:
        raise invalid("inputs", f"inputs: must be 1 to {kserve.MAX_TENSORS} tensors, not {len(given.inputs)}")
    if len(given.outputs) > kserve.MAX_TENSORS:
        raise invalid("outputs", f"outputs: must be at most {kserve.MAX_TENSORS}, not {len(given.outputs)}")
    if len(given.id) > kserve.MAX_NAME_CHARS:
        raise invalid("id", f"id: must have at most {kserve.MAX_NAME_CHARS} characters")
    raw = given.raw_input_contents
    if raw and len(raw) != len(given.inputs):
        raise invalid(
            "raw_input_contents",
            f"raw_input_contents: there are {len(raw)}, and {len(given.inputs)} inputs",
        )
    inputs = []
    for at, tensor in enumerate(given.inputs):
        _check(at, tensor)
        room.admit(tensor.name, tensor.shape)
        if not raw:
            inputs.append(_from_contents(tensor))
        elif tensor.HasField("contents"):
            raise invalid(tensor.name, f"{tensor.name}: has contents beside raw_input_contents")
        else:
            inputs.append(from_bytes(tensor.name, tensor.datatype, tensor.shape, memoryview(raw[at])))
    outputs = [
        kserve.InferOutput(
            name=each.name, parameters=_parameters(each.parameters, f"outputs[{at}].parameters")
        )
        for at, each in enumerate(given.outputs)
    ]
    return kserve.Given(given.id, _parameters(given.parameters, "parameters"), inputs, outputs)


def _check(at: int, tensor: Any) -> None:
    """The checks of an input that the types of InferTensor make over HTTP."""
    if not re.search(kserve.TENSOR_NAME, tensor.name):
        raise invalid(f"inputs[{at}].name", f"inputs[{at}].name: {quoted(tensor.name)} is no input's name")
    if tensor.datatype != TEXT and tensor.datatype not in NUMBERS:
        known = ", ".join((*NUMBERS, TEXT))
        raise invalid(tensor.name, f"{tensor.name}: its datatype must be one of {known}")
    if len(tensor.shape) > MAX_DIMENSIONS or any(not 0 <= size < 2**31 for size in tensor.shape):
        raise invalid(tensor.name, f"{tensor.name}: its shape must be up to {MAX_DIMENSIONS} sizes from 0")


def _from_contents(tensor: Any) -> Tensor:
    name: str = tensor.name
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(name, f"{name}: {tensor.datatype} must be in raw_input_contents")
    values = getattr(tensor.contents, field)
    require_count(name, tensor.shape, len(values))
    values = list(values)
    if tensor.datatype == TEXT:
        values = [text(f"{name}[{at}]", value) for at, value in enumerate(values)]
    return from_values(name, tensor.datatype, tensor.shape, values)


def _parameters(given: Any, place: str) -> dict[str, Any]:
    if len(given) > kserve.MAX_TENSORS:
        raise invalid(place, f"{place}: must be at most {kserve.MAX_TENSORS}, not {len(given)}")
    found = {}
    for name, parameter in given.items():
        chosen = parameter.WhichOneof("parameter_choice")
        found[name] = getattr(parameter, chosen) if chosen else None
    return found


def encoded_answer(asked: kserve.Asked, answer: Answer, raw: bool) -> Any:
    """The ModelInferResponse. raw: whether its tensors are raw, as the request's were."""
    response = _Response(model_name=asked.kind, model_version=answer.model, id=asked.id)
    for name, value in asked.parameters(answer).items():
        if isinstance(value, str):
            response.parameters[name].string_param = value
        else:
            response.parameters[name].int64_param = value
    for name, datatype, values, _ in asked.tensors(answer):
        output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        if raw:
            response.raw_output_contents.append(to_bytes(datatype, values))
        else:
            encoded = [value.encode() for value in values] if datatype == TEXT else values
            getattr(output.contents, CONTENTS[datatype]).extend(encoded)
    return response


def _anybody(key: bytes) -> Caller:
    return ANYBODY


def _metadata(given: Iterable[tuple[str, str | bytes]]) -> tuple[bytes, str]:
    """The Authorization of a call, and its request id, which is made up where it has none."""
    key, request_id = b"", ""
    for name, value in given or ():
        if name == "authorization" and isinstance(value, str):
            key = value.encode(errors="replace")
        elif name == "x-request-id" and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            request_id = value
    return key, request_id or f"{getrandbits(128):032x}"


def _headers(given: Iterable[tuple[str, str | bytes]]) -> list[tuple[bytes, bytes]]:
    """What of a call's metadata a trace reads."""
    return [(name.encode(), value.encode()) for name, value in given if isinstance(value, str)]


def _client(context: Any) -> dict[str, Any]:
    """The client's address, as a scope of ASGI has it."""
    found = re.fullmatch(r"ipv[46]:(.+):\d+", context.peer())
    return {"client": (unquote(found[1]).strip("[]"),) if found else None}


def _is_of_no_client(record: logging.LogRecord) -> bool:
    """Whether what a library says is about more than a client that left, or sent bytes that are no text.

    gRPC writes a traceback of its own code for each of these, and the bytes, which may hold a key.
    """
    error = (record.exc_info or (None, None))[1] or record.msg
    if isinstance(error, UnicodeDecodeError):
        return record.name == "asyncio" and not error.object.startswith(b"/")
    return type(error).__name__ != "ExecuteBatchError"


def _trailing(error: RequestError) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {"jgr-error": error.type}
    if error.field is not None and _REQUEST_ID.fullmatch(error.field):
        found["jgr-field"] = error.field
    if error.type in TRY_AGAIN:
        found["retry-after"] = str(error.retry_after_s)
    return tuple(found.items())
