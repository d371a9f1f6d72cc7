# SPDX-License-Identifier: Apache-2.0
"""What `jgr cluster` checks and tells beside Ray: ports, the head, and what keeps replicas from starting."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jgr.cli.cluster import (
    failure,
    own_port,
    require_address,
    require_head,
    require_proxy,
    require_room,
    tell_failures,
)
from jgr.config import ConfigError
from jgr.config.fleet import FleetConfig
from jgr.fields import UserError


def test_without_ray_one_line_says_how_to_get_it() -> None:
    """Before anything is read or compiled: the folder is not there either."""
    code = "import sys; sys.modules['ray'] = None; from jgr.cli.main import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, "cluster", "no/such/folder"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "jgr: jgr cluster needs ray: pip install 'jgr[cluster]'\n"


def test_a_port_on_which_somebody_listens_is_refused_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = f"server.host, server.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(UserError, match=re.escape(words)):
            own_port("127.0.0.1", port)
        assert own_port("127.0.0.1") not in (0, port)
    assert own_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("more", "warns"),
    [
        (["--set=server.host=0.0.0.0"], True),
        (["--set=server.host=0.0.0.0", "--set=server.api_key=s3cret"], False),
        (["--set=server.host=127.0.0.1"], False),
        (["--set=server.host=localhost"], False),
    ],
)
def test_a_fleet_that_anybody_may_ask_says_so_at_its_start(
    more: list[str], warns: bool, tmp_path: Path
) -> None:
    """The port is taken, so it ends there, before Ray starts, which need not be there."""
    code = (
        "import sys; from importlib.machinery import ModuleSpec; from importlib.util import module_from_spec; "
        "sys.modules['ray'] = module_from_spec(ModuleSpec('ray', None)); "
        "from jgr.cli.main import run; sys.exit(run())"
    )
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = f"--port={other.getsockname()[1]}"
        command = [sys.executable, "-c", code, "cluster", "--null", port, *more]
        home = {**os.environ, "HOME": str(tmp_path)}  # where a token for Ray is kept
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=home)
    assert done.returncode == 2 and "Address already in use" in done.stderr
    assert ("neither server.api_key nor server.keys is set: anybody may ask" in done.stderr) is warns


def test_a_fleet_is_there_once_one_of_its_proxies_listens() -> None:
    states = iter([["STARTING"], ["UNHEALTHY", "STARTING"], ["UNHEALTHY", "HEALTHY"]])
    require_proxy(lambda: next(states), "10.0.0.1:8000")
    assert next(states, None) is None
    for found, said in ((["UNHEALTHY"], "UNHEALTHY"), ([], "there is none")):
        with pytest.raises(UserError, match=rf"no proxy of Ray listens on 10.0.0.1:8000 \({said}\)"):
            require_proxy(lambda found=found: found, "10.0.0.1:8000", patience_s=0.0)  # type: ignore[misc]


def test_items_are_not_given_on_every_address_because_a_field_was_left_empty() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.items_host must not be empty"):
        FleetConfig(items_host="")


def test_a_port_that_the_proxies_of_a_cluster_do_not_have_is_refused() -> None:
    require_address(("0.0.0.0", 8000), ("0.0.0.0", 8000))
    with pytest.raises(
        UserError, match=r"listen on 0.0.0.0:8000, not 127.0.0.1:8001: take that, or end Ray Serve"
    ):
        require_address(("0.0.0.0", 8000), ("127.0.0.1", 8001))


def test_a_head_that_nobody_is_at_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        free = address = f"127.0.0.1:{head.getsockname()[1]}"
        require_head(address)
        require_head(f"ray://{address}")
    for wrong in (free, f"ray://{free}", "127.0.0.1:99999"):
        with pytest.raises(UserError, match=f"--address={wrong}: no Ray cluster answers: "):
            require_head(wrong)
    require_head("auto")


def test_more_replicas_than_a_machine_has_cores_for_are_refused_and_not_waited_for() -> None:
    for fits in (
        FleetConfig(replicas=2),
        FleetConfig(replicas=4, cpus=0.5),
        FleetConfig(replicas=3, cpus=0.0),
    ):
        require_room(fits, {"CPU": 2.0})
    with pytest.raises(
        UserError, match=r"fleet.replicas: 4 with fleet.cpus=1 need 4 CPUs, and Ray finds 2 here"
    ):
        require_room(FleetConfig(replicas=4), {"CPU": 2.0})
    with pytest.raises(UserError, match=r"4 with fleet.gpus=0.5 need 2 GPUs, and Ray finds 0 here"):
        require_room(FleetConfig(replicas=4, cpus=0.5, gpus=0.5), {"CPU": 2.0})


def test_of_a_traceback_ray_tells_what_was_raised() -> None:
    frames = """The deployment failed to start 6 times in a row. Error:
ray::Replica.initialize() (pid=26896)
  File "replica.py", line 122, in _load_as
    for one in self.load(source, configs, places):
RuntimeError: Traceback (most recent call last):
  File "replicated.py", line 36, in of
    raise ConfigError(
"""
    own = "jgr.fields.ConfigError: data_parallel.devices: 3, but this process has 1 device (cpu)"
    assert failure(frames + own) == "data_parallel.devices: 3, but this process has 1 device (cpu)"
    assert failure(f"{frames}ValueError: no: way\nat all\n") == "ValueError: no: way at all"
    assert failure(frames) == "raise ConfigError("
    assert failure("2 replicas that have taken more than 30s\nto be scheduled: {'CPU': 1}") == (
        "2 replicas that have taken more than 30s to be scheduled: {'CPU': 1}"
    )
    assert failure("") == ""


def test_what_keeps_replicas_from_starting_is_told_once_and_when_they_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    over = threading.Event()
    found = iter(
        [
            {"Replica": "", "Front": ""},
            {"Replica": "no room"},
            {"Replica": "no room", "Front": ""},
            {"Replica": "dead"},
            {},
            {"Replica": "", "Front": ""},
            {"Replica": ""},
            {"Replica": "dead"},
        ]
    )

    def messages() -> dict[str, str]:
        told = next(found, None)
        if told is None:
            over.set()
        return told or {}

    with caplog.at_level(logging.INFO, "jgr.cli.cluster"):
        tell_failures(messages, over, every_s=0.0)
    told = ["no room", "dead", "whole again", "dead"]
    assert [record.getMessage() for record in caplog.records] == [f"Replica: {each}" for each in told]
