# SPDX-License-Identifier: Apache-2.0
"""What the head of a request may have, as servers and what stands before them agree on it."""

from __future__ import annotations

import logging
import re

MAX_HEAD_BYTES = 1 << 16
MAX_HEADER_FIELDS = 256
"""Each is a call of Python before anything of the request is known; a head has room for thousands of short ones."""
HEAD_TOO_LARGE = (
    f"the request line and the headers may have at most {MAX_HEAD_BYTES} bytes, and there may be at most "
    f"{MAX_HEADER_FIELDS} headers"
)
REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}")
READ_TIMEOUT_S = 10.0
"""Seconds in which a request must arrive, head and body."""


def is_of_no_client(record: logging.LogRecord) -> bool:
    """Whether what uvicorn logs is of more than bytes that are not HTTP.

    Whoever can connect can send any number of these, and gets an answer that says so.
    """
    return record.msg != "Invalid HTTP request received."
