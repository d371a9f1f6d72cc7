# SPDX-License-Identifier: Apache-2.0
"""Where jgr's log goes: to stderr, a line or a JSON object for each event."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from jgr.fields import one_line

MOST = 4000
"""Characters of a message."""


class _JsonFormatter(logging.Formatter):
    """Writes a JSON object per line: time (UTC), level, logger, message, the call's `extra`, any exception."""

    _standard = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in self._standard}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _LineFormatter(logging.Formatter):
    """Writes a line, whatever the message has from elsewhere, and any exception below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, MOST)
        return super().formatMessage(record)


def set_up(log_format: str, log_level: str) -> None:
    """Log to stderr in `log_format` ("human" or "json"): jgr from `log_level` up, others from warnings up."""
    human = _LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else human)
    level = logging.getLevelNamesMapping()[log_level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("jgr").setLevel(level)
    logging.captureWarnings(True)


def set_up_unless_done() -> None:
    """Log as commands do by default, where nobody has set it up: in a process of a fleet, which Ray starts."""
    if not logging.getLogger().handlers:
        set_up("human", "info")
