# SPDX-License-Identifier: Apache-2.0
"""A pool, its traffic and its latency by epochs, and the controllers that are trained on them (SIM-12, SIM-13)."""
