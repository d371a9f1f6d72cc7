# SPDX-License-Identifier: Apache-2.0
"""Nodes and links in virtual time, which the live policies drive."""
