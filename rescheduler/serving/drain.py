"""`headway drain`: move all requests away from an instance, and show the progress."""

import time

from rescheduler.engines.deployment import Deployment
from rescheduler.serving.admin_client import drain_instance, listed_instances, undrain_instance

__all__ = ["drain"]

_URL = "http://127.0.0.1:8001"
_SECONDS = 0.5


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
    if undo:
        undrain_instance(base, instance)
        print(f"{instance} receives requests again")
        return
    state = drain_instance(base, instance)
    shown = None
    while state.requests:
        left = (state.requests, state.movable)
        if left != shown:
            print(f"{instance}: {left[0]} requests left, {left[1]} of them movable", flush=True)
            shown = left
        time.sleep(_SECONDS)
        state = next((one for one in listed_instances(base) if one.name == instance), state)
    print(f"{instance} is empty: stop it, or put it back with `headway drain {instance} --undo`")
