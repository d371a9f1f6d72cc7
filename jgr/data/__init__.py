# SPDX-License-Identifier: Apache-2.0
"""Plain typed data: prefix trees, interaction sequences and the embedded shop."""
