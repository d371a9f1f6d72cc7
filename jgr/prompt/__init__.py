# SPDX-License-Identifier: Apache-2.0
"""Prompts as segments of tokens: in which layout, and from which templates."""
