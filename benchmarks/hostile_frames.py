# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 frames by hand, for what no gRPC client sends: half a message, none, a path that is no text, no window."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping

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
