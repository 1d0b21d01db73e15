"""The API key with which the engines are probed."""

import os
from pathlib import Path

from rescheduler.engines.deployment import DeploymentError, ProxyOptions

__all__ = ["engine_key"]


def engine_key(options: ProxyOptions) -> str | None:
    """Return the API key of the engines, if they have one.

    Raises:
        DeploymentError: its file cannot be read, or is empty.
    """
    if options.engine_key_file is None:
        return os.environ.get("VLLM_API_KEY") or None
    try:
        key = Path(options.engine_key_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(f"proxy.engine_key_file: {error}") from error
    if not key:
        raise DeploymentError(f"proxy.engine_key_file: {options.engine_key_file} is empty")
    return key
