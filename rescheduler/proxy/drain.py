"""`headway drain`: move all requests away from an instance, and show the progress."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from rescheduler.engines.deployment import Deployment

__all__ = ["drain"]

_URL = "http://127.0.0.1:8000"
_SECONDS = 0.5
_TIMEOUT = 10.0


def drain(
    instance: str,
    config: Deployment | None = None,
    url: str | None = None,
    undo: bool = False,
) -> None:
    """Move all requests away from an instance, so that it can be stopped or upgraded.

    It receives no new requests until --undo. Shows how many are left; Ctrl-C stops the display,
    not the draining.

    Args:
        instance: its name in the deployment.
        config: the deployment, for the proxy's address.
        url: the proxy's address, in place of --config; http://127.0.0.1:8000 when neither is
            given.
        undo: let the instance receive requests again.

    Raises:
        ValueError: both the deployment and the address are given.
        RuntimeError: the proxy does not answer, or does not know the instance.
    """
    if config is not None and url is not None:
        raise ValueError("give --config or --url, not both")
    base = config.proxy_url if config else (url or _URL).rstrip("/")
    quoted = urllib.parse.quote(instance, safe="")
    if undo:
        _ask(f"{base}/admin/undrain/{quoted}", "POST")
        print(f"{instance} receives requests again")
        return
    state = _ask(f"{base}/admin/drain/{quoted}", "POST")
    shown = None
    while state["requests"]:
        left = (state["requests"], state["movable"])
        if left != shown:
            print(f"{instance}: {left[0]} requests left, {left[1]} of them movable", flush=True)
            shown = left
        time.sleep(_SECONDS)
        listed = _ask(f"{base}/admin/instances", "GET")["instances"]
        state = next(entry for entry in listed if entry["name"] == instance)
    print(f"{instance} is empty: stop it, or put it back with `headway drain {instance} --undo`")


def _ask(url: str, method: str) -> Any:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            try:
                message = json.load(error)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"HTTP {error.code}: is that Headway's proxy?"
        raise RuntimeError(message) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RuntimeError(f"{url}: no answer: {error}; does `headway serve` run?") from error
