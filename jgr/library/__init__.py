# SPDX-License-Identifier: Apache-2.0
"""A library of prototypes: keys and values of tokens of reviews, which stand for like tokens of others (RCLLM-2..4)."""
