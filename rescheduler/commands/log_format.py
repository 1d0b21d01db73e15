"""How servers write their logs."""

import logging
import os
import re
import warnings
from typing import Any

__all__ = [
    "LOG_FORMAT",
    "LOG_TIME",
    "EscapingFormatter",
    "escaped",
    "log_serving",
    "quieten",
    "quieten_loggers",
]


LOG_FORMAT, LOG_TIME = "%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"

# Of ASCII and Latin-1, and what else ends a line, reverses it, or is no character.
_CONTROLS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """Return text of somebody else, each line without what a terminal would obey."""
    return "\n".join(_CONTROLS.sub(_escape, line) for line in text.split("\n"))


class EscapingFormatter(logging.Formatter):
    """Writes a message in one line, however many its parts have.

    Names, reasons and errors come from clients, engines and peers: none of them can write a line
    of its own, or what a terminal obeys. A traceback, which is ours, keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line, with escapes in place of control characters."""
        return _CONTROLS.sub(_escape, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return a traceback, with escapes in place of control characters within its lines."""
        return escaped(super().formatException(ei))


def log_serving(verbose: bool) -> None:
    """Write to standard error what servers log, with the time; if ``verbose``, debugging too."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter(LOG_FORMAT, LOG_TIME))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("headway.serve").setLevel(logging.DEBUG if verbose else logging.INFO)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


_ENVIRONMENT = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_LOGGERS = ("lightning.pytorch", "lightning.fabric")


def quieten(verbose: bool) -> None:
    """Silence the notices of vLLM, Lightning, Hugging Face and others, unless ``verbose``.

    What the environment sets already is kept. Call it before these libraries are imported.
    """
    if verbose:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")


def quieten_loggers(verbose: bool) -> None:
    """Silence loggers that set their own level when they are imported, unless ``verbose``."""
    for name in () if verbose else _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
