# SPDX-License-Identifier: Apache-2.0
"""Embedding tables outside the device: shards in files of this machine and in another process."""
