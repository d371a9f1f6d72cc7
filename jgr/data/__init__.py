# SPDX-License-Identifier: Apache-2.0
"""Datasets as plain typed data: interaction sequences, impressions, prepared folders and the synthetic shop."""
