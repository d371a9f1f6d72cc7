# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frames by hand, for what no gRPC client sends: half a message, none, a path that is no text, no window."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK = END_STREAM = 1
END_HEADERS = 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def opening(settings: Mapping[int, int] | None = None) -> bytes:
    """What a client sends first."""
    given = b"".join(struct.pack(">HI", key, value) for key, value in (settings or {}).items())
    return PREFACE + frame(SETTINGS, 0, 0, given)


def call(
    stream: int,
    path: bytes = INFER.encode(),
    metadata: Iterable[tuple[bytes, bytes]] = (),
    message: bytes | None = None,
    *,
    declared: int | None = None,
    end: bool = True,
) -> bytes:
    """A call on an odd stream. message: None: none is sent. declared: its length, as the call says it. end: whether the
    client says that nothing follows."""
    named = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *metadata,
    ]
    fields = b"".join(b"\0" + _text(name) + _text(value) for name, value in named)
    sent = frame(HEADERS, END_HEADERS | (END_STREAM if end and message is None else 0), stream, fields)
    if message is not None:
        size = len(message) if declared is None else declared
        content = b"\0" + size.to_bytes(4, "big") + message
        sent += frame(DATA, END_STREAM if end else 0, stream, content)
    return sent


def _text(content: bytes) -> bytes:
    """A text as HPACK has it, without Huffman's code."""
    size, head = len(content), b""
    if size < 127:
        return bytes((size,)) + content
    head, size = b"\x7f", size - 127
    while size >= 128:
        head, size = head + bytes((size % 128 + 128,)), size // 128
    return head + bytes((size,)) + content


def frames(link: socket.socket) -> Iterable[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and content of what the server sends, until it hangs up; its settings are acknowledged."""
    stream = link.makefile("rb")
    while len(head := stream.read(9)) == 9:
        content = stream.read(int.from_bytes(head[:3], "big"))
        if head[3] == SETTINGS and not head[4] & ACK:
            link.sendall(frame(SETTINGS, ACK, 0))
        yield head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, content


def hostile(rng: random.Random, at: int, message: bytes, metadata: Sequence[tuple[bytes, bytes]]) -> bytes:
    """What one connection sends."""
    streams = range(1, 2 * rng.choice((1, 3, 20)), 2)
    many = range(1, 2_001, 2)
    makers: Sequence[Callable[[], bytes]] = (
        lambda: b"".join(call(n, metadata=metadata, message=b"ab", declared=99, end=False) for n in streams),
        lambda: b"".join(call(n, metadata=metadata) for n in streams),
        lambda: b"".join(call(n, end=False) for n in streams),
        lambda: b"".join(call(n, metadata=metadata, message=message, declared=2**32 - 1) for n in streams),
        lambda: call(1, rng.choice((b"/\xff\xfe", b"/\x80/x"))),
        lambda: call(1, rng.choice((b"", b"x", b"/", b"/a/b/c", b"/" + b"p" * 9_000))),
        lambda: b"".join(call(n, end=False) + frame(RST_STREAM, 0, n, b"\0\0\0\x08") for n in many),
        lambda: frame(CONTINUATION, 0, 1, b"x" * 16_000) * 20,
        lambda: frame(PING, 0, 0, b"12345678") * 2_000,
        lambda: frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 3,
        lambda: call(1, metadata=[(name, key + b"\xff") for name, key in metadata], message=message),
        lambda: call(1, metadata=[*metadata, (b"x-bin", b"\xff")], message=message),
        lambda: call(1, metadata=[*metadata, (b"grpc-encoding", b"gzip")], message=message),
        lambda: call(1, metadata=[(b"a%d" % n, b"v" * 900) for n in range(100)], message=message),
        lambda: bytes(rng.randrange(256) for _ in range(500)),
    )  # fmt: skip
    settings = {INITIAL_WINDOW_SIZE: 0} if at % 5 == 4 else {}
    if at % 17 == 16:
        return b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    if settings:
        return opening(settings) + b"".join(call(n, metadata=metadata, message=message) for n in streams)
    return opening() + makers[at % len(makers)]()
