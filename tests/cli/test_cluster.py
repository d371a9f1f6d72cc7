# SPDX-License-Identifier: Apache-2.0
"""What `jgr cluster` checks beside Ray: the port of its proxies."""

from __future__ import annotations

import re
import socket

import pytest

from jgr.cli.cluster import own_port, require_proxy
from jgr.config import ConfigError
from jgr.config_fleet import FleetConfig
from jgr.fields import UserError


def test_a_port_on_which_somebody_listens_is_refused_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = f"server.host, server.port: cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(UserError, match=re.escape(words)):
            own_port("127.0.0.1", port)
        assert own_port("127.0.0.1") not in (0, port)
    assert own_port("127.0.0.1", port) == port


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
