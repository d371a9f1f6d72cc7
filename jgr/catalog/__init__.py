# SPDX-License-Identifier: Apache-2.0
"""The catalog: items, their semantic ids as a prefix tree, and filters over them."""
