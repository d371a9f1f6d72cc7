# SPDX-License-Identifier: Apache-2.0
"""The `jgr` command: one module per command, found by main.py."""
