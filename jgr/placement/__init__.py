# SPDX-License-Identifier: Apache-2.0
"""Where cached items live: which cache worker holds which item, what that costs, and how it changes (BAT-11, 12)."""
