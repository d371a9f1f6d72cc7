# SPDX-License-Identifier: Apache-2.0
"""What the head of a request may have, as servers and what stands before them agree on it."""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 1 << 16
REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}")
READ_TIMEOUT_S = 10.0
"""Seconds in which a request must arrive, head and body."""
