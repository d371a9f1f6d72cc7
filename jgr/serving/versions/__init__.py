# SPDX-License-Identifier: Apache-2.0
"""Which version of which model serves, over which catalog."""
