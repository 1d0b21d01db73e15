"""A warning of secrets that are none."""

import logging
import stat
from pathlib import Path

__all__ = ["warn_of_open_secret"]

logger = logging.getLogger("headway.secrets")

_OPEN = stat.S_IRWXO | stat.S_IWGRP  # a Kubernetes volume may be its group's to read


def warn_of_open_secret(path: Path) -> None:
    """Warn if a file with a key or a token can be read by every user, or written by its group."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OPEN:
        logger.warning(
            "%s: other users of this machine can use this secret (mode %04o): chmod 600 %s",
            path,
            mode,
            path,
        )
