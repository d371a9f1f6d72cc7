# SPDX-License-Identifier: Apache-2.0
"""Replicas of the engine as an application of Ray Serve, which starts them, watches them and brings requests to them.

A request goes through Ray's proxy to a Front, which chooses a Replica by the policy of `jgr.serving.policies.routing`.
The replica is the same HTTP application as that of `jgr serve`, without sockets.
"""
