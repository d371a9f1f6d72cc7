# SPDX-License-Identifier: Apache-2.0
"""Ablations: what each mechanism of a paper is worth in the served system, by switching it off alone."""
