# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for peers: JSON in, JSON out, connections kept; nothing but the standard library.

A request is handed to the peer's own queue and waited for by its connection's thread, which sleeps meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.peers.lines import Message

Submit = Callable[[Message], "Future[Message]"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def listen(submit: Submit) -> int:
    """Serve on a free port of this machine until the process ends: the port.

    submit: hands in a request's body; the answer, or an exception for a 500, comes from its future.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one packet
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                status, answer = 200, submit(json.loads(body)).result()
            except Exception as error:
                status, answer = 500, {"error": {"type": type(error).__name__, "message": str(error)}}
            wire = json.dumps(answer, separators=(",", ":")).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(wire)))
            self.end_headers()
            self.wfile.write(wire)

        def log_message(self, format: str, *values: object) -> None:
            """Say nothing of each request."""

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
