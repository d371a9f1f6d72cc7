# SPDX-License-Identifier: Apache-2.0
"""Functional models: a frozen config, a parameter pytree declared once, pure functions."""
