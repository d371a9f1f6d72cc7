# SPDX-License-Identifier: Apache-2.0
"""Engines of scorers, which score candidates in one pass: users' parts, candidates' parts, executors."""
