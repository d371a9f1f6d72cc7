# SPDX-License-Identifier: Apache-2.0
"""The cache: pages of one device array, entries at user and item granularity, and what decides about them."""
