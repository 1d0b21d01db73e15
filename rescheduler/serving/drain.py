"""`headway drain`: move all requests away from an instance, and show the progress."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import TypeVar

import msgspec

from rescheduler.engines.deployment import Deployment
from rescheduler.serving.admin_token import TOKEN_VARIABLE, admin_token

__all__ = ["drain"]

Answer = TypeVar("Answer")

_URL = "http://127.0.0.1:8001"
_SECONDS = 0.5
_TIMEOUT = 10.0


class _Instance(msgspec.Struct):
    name: str
    requests: int
    movable: int


class _Instances(msgspec.Struct):
    instances: list[_Instance]


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
        config: the deployment, for the admin port of its proxy, or of its coordinator if it has
            one: on their machine.
        url: the admin address, in place of --config; http://127.0.0.1:8001 when neither
            is given. Its token is that of HEADWAY_ADMIN_TOKEN, or the one that `headway serve`, or
            the coordinator, wrote for its own user on this machine.
        undo: let the instance receive requests again.

    Raises:
        ValueError: both the deployment and the address are given.
        RuntimeError: the proxy does not answer, or does not know the instance.
    """
    if config is not None and url is not None:
        raise ValueError("give --config or --url, not both")
    base = config.admin_url if config else (url or _URL).rstrip("/")
    quoted = urllib.parse.quote(instance, safe="")
    if undo:
        _ask(f"{base}/admin/undrain/{quoted}", "POST", _Instance)
        print(f"{instance} receives requests again")
        return
    state = _ask(f"{base}/admin/drain/{quoted}", "POST", _Instance)
    shown = None
    while state.requests:
        left = (state.requests, state.movable)
        if left != shown:
            print(f"{instance}: {left[0]} requests left, {left[1]} of them movable", flush=True)
            shown = left
        time.sleep(_SECONDS)
        listed = _ask(f"{base}/admin/instances", "GET", _Instances).instances
        state = next((entry for entry in listed if entry.name == instance), state)
    print(f"{instance} is empty: stop it, or put it back with `headway drain {instance} --undo`")


def _ask(url: str, method: str, kind: type[Answer]) -> Answer:
    try:
        token = admin_token(urllib.parse.urlsplit(url).port or 80)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            return msgspec.json.decode(response.read(), type=kind)
    except urllib.error.HTTPError as error:
        with error:
            try:
                message = json.load(error)["error"]["message"]
                if error.code == 401:
                    message += f": set {TOKEN_VARIABLE}, or run as the user of `headway serve`"
            except (ValueError, KeyError, TypeError):
                message = f"HTTP {error.code}: is that Headway's proxy?"
        raise RuntimeError(message) from error
    except msgspec.DecodeError as error:
        raise RuntimeError(f"{url}: is that Headway's proxy? {error}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RuntimeError(
            f"{url}: no answer: {error}; does `headway serve` run on this machine, or "
            "`headway coordinator` if the deployment has one?"
        ) from error
