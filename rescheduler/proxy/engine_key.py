"""The API key with which the engines are probed."""

import os
from pathlib import Path

from data_collection.secret_file import warn_of_open_secret
from data_collection.text_file import read_text
from rescheduler.engines.deployment import DeploymentError, ProxyOptions

__all__ = ["engine_key"]


def engine_key(options: ProxyOptions) -> str | None:
    """Return the API key of the engines, if they have one.

    Raises:
        DeploymentError: its file cannot be read, or is empty, or no header can hold the key.
    """
    if options.engine_key_file is None:
        key = os.environ.get("VLLM_API_KEY", "")
        _refuse_unsendable("VLLM_API_KEY", key)
        return key or None
    path = Path(options.engine_key_file).expanduser()
    try:
        key = read_text(path).strip()
        warn_of_open_secret(path)
    except (OSError, ValueError) as error:
        raise DeploymentError(f"proxy.engine_key_file: {error}") from error
    if not key:
        raise DeploymentError(f"proxy.engine_key_file: {options.engine_key_file} is empty")
    _refuse_unsendable("proxy.engine_key_file", key)
    return key


def _refuse_unsendable(where: str, key: str) -> None:
    if not key.isprintable():
        raise DeploymentError(
            f"{where}: the key holds a line end or another character that no header can, so that "
            "no client could send it: was the Secret, or the file, made with `echo`?"
        )
