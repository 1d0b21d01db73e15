"""How servers write their logs."""

import logging

__all__ = ["LOG_FORMAT", "LOG_TIME", "log_serving"]

LOG_FORMAT, LOG_TIME = "%(asctime)s.%(msecs)03d %(message)s", "%Y-%m-%d %H:%M:%S"


def log_serving(verbose: bool) -> None:
    """Write to standard error what servers log, with the time; if ``verbose``, debugging too."""
    logging.basicConfig(format=LOG_FORMAT, datefmt=LOG_TIME)
    logging.getLogger("headway.serve").setLevel(logging.DEBUG if verbose else logging.INFO)
