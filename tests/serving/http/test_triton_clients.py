# SPDX-License-Identifier: Apache-2.0
"""Triton's own clients, over HTTP and gRPC, against a live server; and gRPC messages that no client sends.

Scores are those of fakes.py: a 0, b -1, c -2, d -3, 7 -4; recommend after [a] begins with c, d, 7.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import trustme
from tritonclient.utils import InferenceServerException

from jgr.config import UserError
from jgr.serving.errors import STATUS
from jgr.serving.http.kserve_grpc import CODES, SERVICE, message_class
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.http.test_http import ROOT
from tools.compile_proto import FOLDER, compile_to

KEY = {"Authorization": "Bearer s3cret"}
METADATA = {"authorization": "Bearer s3cret"}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """Both protocols, with a key."""
    with LiveServer("server.grpc_port=0", "server.api_key=s3cret", "server.open_metrics=true") as server:
        yield server


def grpc_port(server: LiveServer) -> int:
    assert server.listener.grpc is not None
    return server.listener.grpc.port


def tensors(module: Any, **given: Any) -> list[Any]:
    """Inputs of a Triton client: texts as BYTES, numbers as numpy has them."""
    made = []
    for name, value in given.items():
        array = np.array(value, np.object_) if isinstance(value[0], bytes) else np.array(value)
        kind = (
            "BYTES"
            if array.dtype == np.object_
            else {"int32": "INT32", "bool": "BOOL", "float64": "FP64"}[str(array.dtype)]
        )
        made.append(module.InferInput(name, list(array.shape), kind))
        made[-1].set_data_from_numpy(array)
    return made


RANK = {"history": [b"a"], "candidates": [b"d", b"a", b"c"]}


def test_tritons_http_client_connects_and_asks(served: LiveServer) -> None:
    module = tritonclient.http
    with closing(module.InferenceServerClient(f"127.0.0.1:{served.port}")) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("rank", headers=KEY) and client.is_model_ready("recommend", headers=KEY)
        assert client.is_model_ready("rank", "jgr", headers=KEY)
        assert not client.is_model_ready("shop", headers=KEY) and not client.is_model_ready("rank")
        assert client.get_server_metadata(headers=KEY)["name"] == "jgr"
        described = client.get_model_metadata("rank", headers=KEY)
        assert [each["name"] for each in described["inputs"]][:2] == ["history", "candidates"]
        found = client.infer("rank", tensors(module, **RANK), headers=KEY, request_id="mine")
        assert found.as_numpy("item_ids").tolist() == [b"a", b"c", b"d"]
        assert found.as_numpy("scores").tolist() == [0.0, -2.0, -3.0]
        assert found.as_numpy("scores").dtype == np.float32
        assert (found.get_response()["id"], found.get_response()["model_version"]) == ("mine", "jgr")
        given = tensors(module, history=[b"a"], top_k=np.array([3], np.int32), exclude_history=[True])
        wanted = [
            module.InferRequestedOutput("item_ids", binary_data=False),
            module.InferRequestedOutput("scores"),
        ]
        found = client.infer("recommend", given, outputs=wanted, headers=KEY, timeout=60_000_000, priority=2)
        assert found.as_numpy("item_ids").tolist() == ["c", "d", "7"]
        assert found.as_numpy("scores").tolist() == [0.0, -1.0, -2.0]
        waiting = client.async_infer("rank", tensors(module, **RANK), headers=KEY)
        assert waiting.get_result().as_numpy("item_ids").tolist() == [b"a", b"c", b"d"]
        with pytest.raises(InferenceServerException, match="item 'zzz' is not in the catalog") as raised:
            client.infer("rank", tensors(module, history=[b"a"], candidates=[b"zzz"]), headers=KEY)
        assert raised.value.status() == "422"
        with pytest.raises(InferenceServerException, match="needs the header") as raised:
            client.infer("rank", tensors(module, **RANK))
        assert raised.value.status() == "401"


def test_tritons_grpc_client_connects_and_asks(served: LiveServer) -> None:
    module = tritonclient.grpc
    with closing(module.InferenceServerClient(f"127.0.0.1:{grpc_port(served)}")) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("rank", headers=METADATA) and client.is_model_ready(
            "rank", "jgr", headers=METADATA
        )
        assert client.get_server_metadata(headers=METADATA).extensions == ["binary_tensor_data"]
        described = client.get_model_metadata("recommend", headers=METADATA)
        assert list(described.versions) == ["jgr"]
        assert [(each.name, list(each.shape)) for each in described.outputs][1] == ("scores", [-1])
        found = client.infer("rank", tensors(module, **RANK), headers=METADATA, request_id="mine")
        assert found.as_numpy("item_ids").tolist() == [b"a", b"c", b"d"]
        assert found.as_numpy("scores").tolist() == [0.0, -2.0, -3.0]
        assert (found.get_response().id, found.get_response().model_version) == ("mine", "jgr")
        assert (
            found.get_response().parameters["catalog_version"].string_param == served.engine.catalog.version
        )
        given = tensors(module, history=[b"a"], top_k=np.array([3], np.int32))
        found = client.infer(
            "recommend", given, headers=METADATA, timeout=60_000_000, priority=2, client_timeout=60.0,
            outputs=[module.InferRequestedOutput("metadata"), module.InferRequestedOutput("item_ids")],
        )  # fmt: skip
        assert found.as_numpy("item_ids").tolist() == [b"c", b"d", b"7"]
        assert found.as_numpy("metadata").tolist()[0] == b'{"title":"title of c"}'


@pytest.mark.parametrize(
    ("model", "given", "key", "code", "words"),
    [
        ("rank", RANK, {}, "UNAUTHENTICATED", "needs the header"),
        ("rank", RANK, {"authorization": "Bearer wrong"}, "UNAUTHENTICATED", "needs the header"),
        ("shop", RANK, METADATA, "NOT_FOUND", "there is no model 'shop'"),
        ("rank", {"history": [b"a"]}, METADATA, "INVALID_ARGUMENT", "candidates is required"),
        ("rank", {"history": [b"a"], "candidates": [b"zzz"]}, METADATA, "INVALID_ARGUMENT", "not in the catalog"),
        ("rank", {**RANK, "top_k": np.array([0], np.int32)}, METADATA, "INVALID_ARGUMENT", "top_k"),
        ("rank", {**RANK, "user_id": [b"\xff"]}, METADATA, "INVALID_ARGUMENT", "not UTF-8"),
    ],
)  # fmt: skip
def test_grpc_refuses_with_a_code(
    served: LiveServer, model: str, given: Any, key: dict[str, str], code: str, words: str
) -> None:
    module = tritonclient.grpc
    with closing(module.InferenceServerClient(f"127.0.0.1:{grpc_port(served)}")) as client:
        with pytest.raises(InferenceServerException, match=words) as raised:
            client.infer(model, tensors(module, **given), headers=key)
        assert raised.value.status() == f"StatusCode.{code}"


def call(
    channel: grpc.Channel, method: str, data: bytes, metadata: Any = METADATA, **more: Any
) -> grpc.Future:
    return channel.unary_unary(f"/{SERVICE}/{method}").future(data, metadata=tuple(metadata.items()), **more)


def rank_message(**more: Any) -> Any:
    """A ModelInferRequest whose tensors are not raw, as KServe's own client sends them."""
    request = message_class("ModelInferRequest")(model_name="rank", **more)
    for name, values in RANK.items():
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        tensor.contents.bytes_contents.extend(values)
    return request


def test_errors_over_grpc_have_the_name_field_and_request_id(served: LiveServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port(served)}") as channel:
        wrong = rank_message()
        wrong.inputs[1].contents.bytes_contents[1] = b"zzz"
        failed = call(channel, "ModelInfer", wrong.SerializeToString(), {**METADATA, "x-request-id": "mine"})
        assert failed.exception(PATIENCE_S).code() == grpc.StatusCode.INVALID_ARGUMENT
        trailing = dict(failed.trailing_metadata())
        assert (
            trailing.items()
            >= {"x-request-id": "mine", "jgr-error": "invalid_request", "jgr-field": "candidates[1]"}.items()
        )
        good = call(channel, "ModelInfer", rank_message().SerializeToString())
        answer = message_class("ModelInferResponse").FromString(good.result(PATIENCE_S))
        assert list(answer.outputs[0].contents.bytes_contents) == [b"a", b"c", b"d"], (
            "in the form of the request"
        )
        assert (
            list(answer.outputs[1].contents.fp32_contents) == [0.0, -2.0, -3.0]
            and not answer.raw_output_contents
        )
        assert len(dict(good.trailing_metadata())["x-request-id"]) == 32
    assert CODES.keys() == STATUS.keys()


def test_deadlines_are_the_calls_own_and_a_call_that_ends_is_cancelled() -> None:
    with LiveServer("server.grpc_port=0", "batching.order=edf", "batching.max_queue=1") as server:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port(server)}") as channel:
            data = rank_message().SerializeToString()
            server.executor.hold()
            running = call(channel, "ModelInfer", data, {})
            server.executor.wait_entered()
            late = call(channel, "ModelInfer", data, {}, timeout=0.05)
            assert late.exception(PATIENCE_S).code() == grpc.StatusCode.DEADLINE_EXCEEDED
            server.wait_for("jgr_queue_depth", 0)
            counted = f'jgr_requests_total{{endpoint="/{SERVICE}/ModelInfer",status="%d"}}'
            by_caller = server.counted(
                counted % 499
            )  # chance: either the caller's clock is first, or the server's
            assert by_caller + server.counted(counted % 504) == 1
            waiting = call(channel, "ModelInfer", data, {})
            server.wait_for("jgr_queue_depth", 1)
            full = call(channel, "ModelInfer", data, {})
            assert full.exception(PATIENCE_S).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(full.trailing_metadata())["retry-after"] == "1"
            waiting.cancel()
            server.wait_for("jgr_queue_depth", 0)
            server.executor.release()
            assert running.result(PATIENCE_S)
            assert server.metric(counted % 200) == 1 and server.metric(counted % 429) == 1
            server.wait_for(counted % 499, by_caller + 1)
        assert server.executor.batches == [1], "what was cancelled never ran"


def test_whatever_message_comes_it_is_refused_well(
    served: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    request = message_class("ModelInferRequest")(model_name="rank")
    for name, values in RANK.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in values))
    good = [rank_message().SerializeToString(), request.SerializeToString()]
    seen = set()
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port(served)}") as channel:
        for _ in range(60):
            asked = []
            for _ in range(20):
                broken = bytearray(rng.choice(good))
                for _ in range(rng.choice((0, 1, 2, 5))):
                    broken[rng.randrange(len(broken))] = rng.randrange(256)
                method = rng.choice(
                    ("ModelInfer", "ModelInfer", "ModelReady", "ModelMetadata", "ServerLive", "None")
                )
                data = bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.2 else broken)
                asked.append((data, call(channel, method, data)))
            for data, future in asked:
                error = future.exception(PATIENCE_S)
                code = "OK" if error is None else error.code().name
                assert code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"), (code, data)
                seen.add(code)
    assert seen == {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
    assert not caplog.records


def test_a_message_above_the_limit_is_refused() -> None:
    with LiveServer("server.grpc_port=0", "server.max_body_bytes=2000") as server:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port(server)}") as channel:
            large = rank_message(id="x" * 2000).SerializeToString()
            error = call(channel, "ModelInfer", large, {}).exception(PATIENCE_S)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_speaks_tls_where_http_does(tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1", "localhost")
    made.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "certificate.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    pair = (f"server.tls_certificate={tmp_path}/certificate.pem", f"server.tls_key={tmp_path}/key.pem")
    with LiveServer("server.grpc_port=0", *pair) as server:
        address = f"127.0.0.1:{grpc_port(server)}"
        secure = {"ssl": True, "root_certificates": str(tmp_path / "authority.pem")}
        with closing(tritonclient.grpc.InferenceServerClient(address, **secure)) as client:
            found = client.infer("rank", tensors(tritonclient.grpc, **RANK))
            assert found.as_numpy("item_ids").tolist() == [b"a", b"c", b"d"]


def test_a_port_that_is_taken_ends_the_start_in_a_line() -> None:
    with LiveServer() as other, pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{other.port}"):
        LiveServer(f"server.grpc_port={other.port}")


def test_without_the_extra_the_start_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None; sys.argv = ['jgr', 'serve', '--null', '--set=server.grpc_port=0']\n"
        "from jgr.cli.main import run; sys.exit(run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jgr: server.grpc_port: needs gRPC") and "jgr[grpc]" in done.stderr


def test_without_grpc_nothing_of_it_is_loaded() -> None:
    code = "import sys, jgr.serving.http.listener; print('grpc' in sys.modules, 'google.protobuf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_committed_descriptor_is_that_of_the_proto(tmp_path: Path) -> None:
    compile_to(tmp_path / "made.binpb")
    assert (tmp_path / "made.binpb").read_bytes() == (FOLDER / "kserve.binpb").read_bytes()
