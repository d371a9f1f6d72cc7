# SPDX-License-Identifier: Apache-2.0
"""How much of a tensor that is too large is looked at before it is refused: what its shape says is known before."""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import Raw

from jgr.serving.errors import RequestError
from jgr.serving.http import kserve, kserve_grpc, tensors
from jgr.serving.http.kserve_inputs import Room
from tests.serving.fakes import LiveServer
from tests.serving.http.test_kserve import HISTORY, INFER, binary, told

YOUNG = 100


@pytest.fixture
def room(server: LiveServer) -> Room:
    return Room("rank", [server.engine.info])


@pytest.fixture
def collected() -> Iterator[list[str]]:
    """Grows with each hundred objects that hold others, such as lists, and that stay."""
    usual, found = gc.get_threshold(), []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    gc.freeze()  # what other tests left is not looked at in any collection
    gc.callbacks.append(note)
    gc.set_threshold(YOUNG, *usual[1:])
    yield found
    gc.set_threshold(*usual)
    gc.callbacks.remove(note)
    gc.unfreeze()


class Counted(bytearray):
    """Bytes that count how often some of them are taken."""

    taken = 0

    def __getitem__(self, at: Any) -> Any:
        self.taken += 1
        return super().__getitem__(at)


def not_to_be_called(*_: Any) -> Any:
    raise AssertionError("its elements were looked at")


@pytest.mark.parametrize("path", [INFER, "/v2/models/recommend/infer"])
def test_what_the_shape_says_is_too_much_is_not_looked_at(
    server: LiveServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_texts", not_to_be_called)
    monkeypatch.setattr(tensors, "from_values", not_to_be_called)
    body, headers = binary(("history", "BYTES", [200_000], bytes(800_000)))
    reply = server.call(path, body, **headers)
    assert told(reply) == (422, "invalid_request", "history")
    assert reply.json["error"] == "history has 200000 items; the limit is 4096"
    shape = {**HISTORY, "shape": [1, 200_000], "data": [[""] * 200_000]}
    assert told(server.call(path, {"inputs": [shape]})) == (422, "invalid_request", "history")


def test_one_name_has_room_once(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else many tensors of the largest size that one may have would be looked at."""
    looked_at, texts = [], tensors._texts
    monkeypatch.setattr(tensors, "_texts", lambda *given: looked_at.append(given[0]) or texts(*given))
    body, headers = binary(*[("history", "BYTES", [4_000], bytes(16_000))] * 50)
    reply = server.call(INFER, body, **headers)
    assert "there are two called 'history'" in reply.json["error"]
    assert looked_at == ["history"]


def test_more_bytes_than_the_shape_says_are_left_alone() -> None:
    data = Counted(struct.pack("<I", 0) * 200_000)
    with pytest.raises(RequestError, match="history: its data has more elements than its shape says, 3"):
        tensors._texts("history", data, 3)  # type: ignore[arg-type]
    assert data.taken <= 2 * 3


def deep(lists: int, depth: int) -> bytes:
    return b"[" + b",".join([b"[" * depth + b"]" * depth] * lists) + b"]"


@pytest.mark.parametrize("shape", [[2], [1, 2], [1] * 7 + [2]])
@pytest.mark.parametrize(
    "data", [deep(1_000, 500), deep(200_000, 1), deep(2, 1_000), b"[" + deep(2, 500) + b"]"]
)
def test_lists_in_lists_are_not_made(collected: list[str], shape: list[int], data: bytes) -> None:
    raw = Raw(data)
    with pytest.raises(
        RequestError, match=r"history(\[0\]: an element of BYTES cannot be a list|: its data is not)"
    ):
        tensors.from_json("history", "BYTES", shape, raw)
    assert len(collected) < 10, "they would be hundreds of thousands"


@pytest.mark.parametrize(
    "more",
    [
        lambda data: b'{"inputs":[{"name":"history","shape":[2],"datatype":"BYTES","data":%b}]}' % data,
        lambda data: b'{"inputs":[],"parameters":{"x":%b}}' % data,
        lambda data: (
            b'{"inputs":[{"name":"history","shape":[2],"datatype":"BYTES","parameters":{"x":%b}}]}' % data
        ),
    ],
)
def test_a_body_of_lists_in_lists_is_refused_before_they_are_made(
    collected: list[str], room: Room, more: Callable[[bytes], bytes]
) -> None:
    collected.clear()
    with pytest.raises(RequestError):
        kserve.read_http(more(deep(1_000, 500)), None, room)
    assert len(collected) < 10, "they would be hundreds of thousands"


def test_json_in_a_tensor_is_numbers_by_name_alone(collected: list[str], room: Room) -> None:
    text = deep(1_000, 500).decode()
    context = tensors.Tensor("context", "BYTES", [text])
    collected.clear()
    with pytest.raises(RequestError, match="context: must be an object"):
        kserve.asked("rank", "", kserve.Given("", {}, [context], []))
    assert len(collected) < 10, "they would be hundreds of thousands"


def test_the_shape_counts_over_grpc_too(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_texts", not_to_be_called)
    monkeypatch.setattr(kserve_grpc, "text", not_to_be_called)

    def read() -> None:
        kserve_grpc.read(message, Room("rank", [server.engine.info]))

    message = kserve_grpc.message_class("ModelInferRequest")(model_name="rank")
    tensor = message.inputs.add(name="history", datatype="BYTES", shape=[200_000])
    tensor.contents.bytes_contents.extend([b""] * 200_000)
    with pytest.raises(RequestError, match="history has 200000 items; the limit is 4096"):
        read()
    message.inputs[0].shape[0] = 3
    with pytest.raises(RequestError, match="history: its data has 200000 elements"):
        read()
    message.inputs[0].ClearField("contents")
    message.inputs[0].shape[0] = 200_000
    message.raw_input_contents.append(bytes(800_000))
    with pytest.raises(RequestError, match="history has 200000 items; the limit is 4096"):
        read()


def test_a_message_may_have_as_many_parameters_as_a_body(room: Room) -> None:
    message = kserve_grpc.message_class("ModelInferRequest")(model_name="rank")
    message.inputs.add(name="history", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    for at in range(65):
        message.parameters[f"p{at}"].int64_param = at
    with pytest.raises(RequestError, match="parameters: must be at most 64, not 65"):
        kserve_grpc.read(message, room)


def test_the_limits_are_those_of_the_fields(server: LiveServer) -> None:
    """Of rank's inputs each with one element more than it may have."""
    info = server.engine.info
    for name, limit in (
        ("history", info.max_history),
        ("candidates", info.max_candidates),
        ("history_times", 4096),
    ):
        Room("rank", [info]).admit(name, [1, limit])
        with pytest.raises(RequestError, match=f"{name} has {limit + 1} items; the limit is {limit}"):
            Room("rank", [info]).admit(name, [1, limit + 1])
    for name, limit in (("deny", info.max_filter_items), ("segments", 16)):
        Room("recommend", [info]).admit(name, [limit])
        with pytest.raises(RequestError, match=f"{name} has {limit + 1} items; the limit is {limit}"):
            Room("recommend", [info]).admit(name, [limit + 1])
