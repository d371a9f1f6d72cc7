# SPDX-License-Identifier: Apache-2.0
"""Engines of decoders: prompts, packed rows, executors."""
