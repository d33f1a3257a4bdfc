"""Logs of the service: one line per event, as text or JSON, without secrets of clients."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

FORMATS = ("text", "json")
_LOGGERS = ("cliquetta.serve", "uvicorn")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "color_message"}


class JSONFormatter(logging.Formatter):
    """One JSON object per line; fields given as ``extra`` are its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line[name] = value
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineFormatter(logging.Formatter):
    """Plain text; line breaks and control characters of a message are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line, and the trace of an error below it."""
        text = "".join(map(_printable, record.getMessage()))
        line = f"{record.levelname.lower()}: {text}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


def _printable(character: str) -> str:
    return character if character.isprintable() else f"\\x{ord(character):02x}"


@contextmanager
def logging_as(kind: str) -> Iterator[None]:
    """Log to standard error inside the block; every request as well if ``kind`` is ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if kind == "json" else LineFormatter())
    handler.setLevel(logging.INFO if kind == "json" else logging.WARNING)
    before = []
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO if name == _LOGGERS[0] else logging.WARNING)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
