# SPDX-License-Identifier: Apache-2.0
"""Two nodes of a Ray cluster on one machine, each in a network namespace, over a link that can be cut.

The head's storage is a Redis server, from which it starts again. The second node has another folder in the place of
the model's version `two`: it is the bad node of a rollout. It can be given a jgr that speaks another protocol. Needs
root, iproute2, nsenter and redis-server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.fault_world import PATIENCE_S, ROOT, Fleet, Models, descendants, title, until
from benchmarks.harness import Missing
from benchmarks.pda_world import redis_program
from jgr.serving.cluster import protocol

PORT, GCS, REDIS = 8000, 6379, 6380
SPOKEN = f"PROTOCOL = {protocol.PROTOCOL}\n"


class Nodes:
    """head, second: names of the namespaces. urls: of the proxies, as the machine itself reaches them."""

    def __init__(self, models: Models, folder: Path) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise Missing("two nodes need root and iproute2 for their network namespaces")
        redis = redis_program()
        tag = f"{os.getpid() % 10_000}"
        net = f"10.{77 + os.getpid() % 100}"
        self.head, self.second = f"jgrh{tag}", f"jgrs{tag}"
        self._links = (f"jh{tag}", f"js{tag}")
        self.addresses = (f"{net}.0.1", f"{net}.0.2")
        self.urls = [f"http://{net}.{at}.2:{PORT}" for at in (1, 2)]
        self._net, self._models, self._folder = net, models, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_REDIS_ADDRESS": f"{self.addresses[0]}:{REDIS}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(folder),
        }
        self._redis = redis

    def __enter__(self) -> Nodes:
        try:
            self._connect()
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started[::-1]:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for pid in self._inside():  # those that were started again, and what a killed parent has left
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in (self.head, self.second):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
        for link in self._links:
            subprocess.run(["ip", "link", "delete", link], check=False, stderr=subprocess.DEVNULL)

    def fleet(self, *settings: str) -> Fleet:
        """`jgr cluster` on both nodes, deployed from the head."""
        given = ("server.host=0.0.0.0", f"server.port={PORT}", *settings)
        fleet = Fleet(
            self._models.files,
            2,
            self._folder / "deploy",
            *given,
            address=f"{self.addresses[0]}:{GCS}",
            before=("ip", "netns", "exec", self.head),
            environment=self._environment,
        )
        fleet.url = self.urls[0]
        return fleet

    def cut(self) -> None:
        """Nothing goes from one node to the other any more, and nobody is told."""
        for name, other in zip((self.head, self.second), self.addresses[::-1], strict=True):
            _ip(
                "-n",
                name,
                "neigh",
                "replace",
                other,
                "lladdr",
                "02:00:00:00:00:99",
                "dev",
                "pair",
                "nud",
                "permanent",
            )

    def mend(self) -> None:
        for name, other in zip((self.head, self.second), self.addresses[::-1], strict=True):
            _ip("-n", name, "neigh", "del", other, "dev", "pair")

    def kill_head(self) -> list[str]:
        """Kill what keeps the cluster's state; the command that starts it again."""
        (pid,) = [pid for pid in self._inside() if "gcs/gcs_server" in title(pid).split(" ")[0]]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        os.kill(pid, signal.SIGKILL)
        return command

    def start_head(self, command: Sequence[str]) -> None:
        self._run(self.head, *command)

    def give_another_jgr(self) -> None:
        """Processes that the second node starts from now on speak another protocol than all others."""
        ours = Path(protocol.__file__)
        other = self._folder / "protocol.py"
        before, found, after = ours.read_text().partition(SPOKEN)
        if not found:
            raise RuntimeError(f"{ours} does not hold {SPOKEN!r}")
        other.write_text(f"{before}PROTOCOL = {protocol.PROTOCOL + 1}\n{after}")
        self._on_second("mount", "--bind", str(other), str(ours))

    def take_it_back(self) -> None:
        """Processes that the second node starts from now on speak the protocol of all others."""
        self._on_second("umount", protocol.__file__)

    def refused(self) -> bool:
        """Whether Ray's logs tell of a process that was refused for its protocol."""
        logs = (self._folder / "ray").glob("session_2*/logs/serve/*.log")
        return any("they cannot serve together" in log.read_text(errors="replace") for log in logs)

    def _on_second(self, *command: str) -> None:
        """Run a command among the second node's mounts."""
        (raylet,) = (pid for pid in self._inside(self.second) if "raylet/raylet" in title(pid).split(" ")[0])
        _done("nsenter", f"--target={raylet}", "--mount", *command)

    def pids(self, second: bool, of: str) -> list[int]:
        """Processes of one node whose titles begin so."""
        name = self.second if second else self.head
        return [pid for pid in self._inside(name) if title(pid).startswith(of)]

    def _connect(self) -> None:
        for name in (self.head, self.second):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "link",
            "add",
            "pair",
            "netns",
            self.head,
            "type",
            "veth",
            "peer",
            "name",
            "pair",
            "netns",
            self.second,
        )
        for at, (name, link) in enumerate(zip((self.head, self.second), self._links, strict=True), 1):
            _ip("-n", name, "address", "add", f"{self.addresses[at - 1]}/24", "dev", "pair")
            _ip("-n", name, "link", "set", "pair", "up")
            _ip("link", "add", link, "type", "veth", "peer", "name", "out", "netns", name)
            _ip("address", "add", f"{self._net}.{at}.1/24", "dev", link)
            _ip("link", "set", link, "up")
            _ip("-n", name, "address", "add", f"{self._net}.{at}.2/24", "dev", "out")
            _ip("-n", name, "link", "set", "out", "up")

    def _start(self) -> None:
        self._run(
            self.head,
            self._redis,
            "--bind",
            self.addresses[0],
            "--port",
            str(REDIS),
            "--protected-mode",
            "no",
            "--save",
            "",
        )
        # Not --block: it would end all of a node with the head's storage that is killed.
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1"]
        ray += ["--object-store-memory=100000000", "--disable-usage-stats"]
        self._run(
            self.head, *ray, "--head", f"--node-ip-address={self.addresses[0]}", f"--port={GCS}",
            "--include-dashboard=false", f"--temp-dir={self._folder / 'ray'}",
        )  # fmt: skip
        self._await("gcs/gcs_server")
        bad, two = self._models.folder / "empty", self._models.folder / "two"
        mounted = f'mount --bind {bad} {two} && exec "$@"'
        join = ["sh", "-c", mounted, "sh", *ray, f"--node-ip-address={self.addresses[1]}"]
        self._run(self.second, *join, f"--address={self.addresses[0]}:{GCS}")
        self._await("raylet/raylet", 2)

    def _await(self, what: str, count: int = 1) -> None:
        def there() -> bool:
            return sum(what in title(pid).split(" ")[0] for pid in self._inside()) >= count

        if until(there, PATIENCE_S) is None:
            raise Missing(f"{what} did not start: {(self._folder / 'log').read_text()[-2000:]}")
        time.sleep(3.0)

    def _run(self, inside: str, *command: str) -> None:
        with (self._folder / "log").open("a") as log:
            self._started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", inside, *command],
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    cwd=self._folder,
                )
            )

    def _inside(self, name: str = "") -> list[int]:
        """The processes in the namespaces."""
        found = []
        for each in (name,) if name else (self.head, self.second):
            listed = subprocess.run(
                ["ip", "netns", "pids", each], capture_output=True, text=True, check=False
            )
            found += [int(line) for line in listed.stdout.split()]
        return found


def _ip(*words: str) -> None:
    _done("ip", *words)


def _done(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{' '.join(command)}: {done.stderr.strip()}")
