"""The token that whoever operates the proxy has to know."""

import os
import secrets
from pathlib import Path

from data_collection.text_file import read_text

__all__ = ["TOKEN_VARIABLE", "admin_token", "admin_token_place", "create_admin_token"]

TOKEN_VARIABLE = "HEADWAY_ADMIN_TOKEN"
_FOLDER = Path(".cache") / "headway"


def admin_token(port: int) -> str | None:
    """Return the token of the proxy on this machine whose admin listener has a port.

    Returns:
        What `TOKEN_VARIABLE` says, or what the proxy wrote for its own user; None: neither.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    try:
        return read_text(_path(port)).strip() or None
    except ValueError:
        return None


def create_admin_token(port: int) -> str:
    """Return `TOKEN_VARIABLE`, or a new token, written where only this user can read it.

    Raises:
        OSError: it cannot be written.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    token = secrets.token_urlsafe(32)
    path = _path(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # with whatever permissions it had
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def admin_token_place(port: int) -> str:
    """Return in words where the operator finds the token of the proxy of this process."""
    return TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else str(_path(port))


def _path(port: int) -> Path:
    return Path.home() / _FOLDER / f"admin-{port}.token"
