"""What an operator asks a proxy or a coordinator on this machine."""

import json
import math
import os
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from data_collection.files import read_text
from rescheduler.engines.deployment import Deployment

TOKEN_VARIABLE = "HEADWAY_ADMIN_TOKEN"
_FOLDER = Path(".cache") / "headway"


def admin_token(port: int) -> str | None:
    """Return what `TOKEN_VARIABLE` says, or what the proxy with this admin port has written."""
    try:
        return os.environ.get(TOKEN_VARIABLE) or read_text(_path(port)).strip() or None
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


def forget_admin_token(port: int, token: str) -> None:
    """Remove a token that was written here, unless another proxy has written its own since."""
    path = _path(port)
    with suppress(OSError, ValueError):
        if read_text(path).strip() == token:
            path.unlink()


def admin_token_place(port: int) -> str:
    """Return in words where the operator finds the token of the proxy of this process."""
    return TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else str(_path(port))


def _path(port: int) -> Path:
    return Path.home() / _FOLDER / f"admin-{port}.token"


Answer = TypeVar("Answer")

_TIMEOUT = 10.0
_LARGEST_ANSWER = 16 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none: the token would go along."""


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Opens addresses without the proxies of the environment, which would read the token."""


class Listed(msgspec.Struct):
    """An instance, as whoever places requests sees it.

    Attributes:
        state: ``closed`` when it is in service, as of a circuit breaker.
        movable: of its requests, that can be moved away.
        drain_seconds: until all that runs there now has ended, nine times in ten, if nothing moves;
            None while that is not known.
    """

    name: str
    role: str
    state: str
    draining: bool
    requests: int
    movable: int
    drain_seconds: float | None = None


class _Instances(msgspec.Struct):
    instances: list[Listed]


def listed_instances(base: str) -> list[Listed]:
    """Return all instances; raises `RuntimeError` without an answer that this operator may have."""
    return _ask(f"{base}/admin/instances", "GET", _Instances).instances


def drain_instance(base: str, name: str) -> Listed:
    """Begin to drain an instance; raises as `listed_instances`, also when there is none."""
    return _ask(f"{base}/admin/drain/{urllib.parse.quote(name, safe='')}", "POST", Listed)


def undrain_instance(base: str, name: str) -> Listed:
    """Let requests come to an instance again; raises as `drain_instance`."""
    return _ask(f"{base}/admin/undrain/{urllib.parse.quote(name, safe='')}", "POST", Listed)


def _ask(url: str, method: str, kind: type[Answer]) -> Answer:
    try:
        token = admin_token(urllib.parse.urlsplit(url).port or 80)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(url, method=method, headers=headers)
        with _DIRECT.open(request, timeout=_TIMEOUT) as response:
            return msgspec.json.decode(response.read(_LARGEST_ANSWER), type=kind)
    except urllib.error.HTTPError as error:
        with error:
            try:
                message = json.loads(error.read(_LARGEST_ANSWER))["error"]["message"]
                if error.code == 401:
                    message += f": set {TOKEN_VARIABLE}, or run as the user of `headway serve`"
            except (ValueError, KeyError, TypeError, RecursionError):
                message = f"HTTP {error.code}: is that Headway's proxy?"
        raise RuntimeError(message) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RuntimeError(f"{url}: is that Headway's proxy? {error}") from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RuntimeError(
            f"{url}: no answer: {error}; does `headway serve` run on this machine, or "
            "`headway coordinator` if the deployment has one?"
        ) from error


_URL = "http://127.0.0.1:8001"
_SECONDS = 0.5


def drain(
    instance: str | None,
    config: Deployment | None = None,
    url: str | None = None,
    undo: bool = False,
    soonest: bool = False,
    list: bool = False,
) -> None:
    """Move all requests away from an instance, to stop or upgrade it.

    It receives no new requests until --undo. Shows how many are left; Ctrl-C stops the display,
    not the draining.

    Args:
        instance: The instance's name in the deployment. Or give --soonest or --list.
        config: the deployment, for the admin port of its proxy, or of its coordinator if it has
            one: on their machine.
        url: The proxy's or the coordinator's admin address, instead of --config. If neither is
            given, http://127.0.0.1:8001. The token is HEADWAY_ADMIN_TOKEN, or the one that the
            server wrote for its own user on this machine.
        undo: let the instance receive requests again.
        soonest: Drain the decode instance that will probably be empty first. The last one in
            service is never drained.
        list: Drain nothing. Print each decode instance in service, and after how many seconds it
            will probably be empty if nothing moves, the soonest first. Instances for which this is
            unknown are left out.

    Raises:
        ValueError: options that do not go together.
        RuntimeError: the proxy does not answer, does not know the instance, or would have none left
            in service.
    """
    if config is not None and url is not None:
        raise ValueError("give --config or --url, not both")
    if (instance is not None) + soonest + list != 1:
        raise ValueError("give the name of an instance, --soonest or --list, and one of them only")
    if undo and instance is None:
        raise ValueError("--undo takes the name of an instance")
    base = config.admin_url if config else (url or _URL).rstrip("/")
    if list:
        for one in by_drain_seconds(listed_instances(base)):
            if math.isfinite(seconds := _seconds(one)):
                print(one.name, math.ceil(seconds))
    elif instance is not None and undo:
        undrain_instance(base, instance)
        print(f"{instance} receives requests again")
    else:
        _drain(base, _soonest(base) if instance is None else instance)


def by_drain_seconds(instances: Sequence[Listed]) -> list[Listed]:
    """Return the decode instances in service, the one first that is expected to be empty first.

    Of those of which that is not known, and of equal ones, that with the fewest requests.
    """
    known = (one for one in instances if one.role == "decode" and one.state == "closed")
    return sorted(known, key=lambda one: (_seconds(one), one.requests))


def _seconds(one: Listed) -> float:
    if not one.requests:
        return 0.0
    return math.inf if one.drain_seconds is None else one.drain_seconds


def _soonest(base: str) -> str:
    """Say and return which instance is expected to be empty first."""
    serving = [one for one in by_drain_seconds(listed_instances(base)) if not one.draining]
    if not serving:
        raise RuntimeError("no decode instance is in service that is not being drained already")
    first = serving[0]
    if len(serving) == 1:
        raise RuntimeError(
            f"{first.name} is not drained: it is the last decode instance in service"
        )
    if not first.requests:
        why = "has no requests"
    elif first.drain_seconds is None:
        why = "has the fewest requests; when they end is not known"
    else:
        why = f"is expected to be empty first: within {first.drain_seconds:.3g} s if nothing moves"
    print(f"{first.name} {why}", flush=True)
    return first.name


def _drain(base: str, name: str) -> None:
    """Drain an instance, and say how many requests are left until none is."""
    state = drain_instance(base, name)
    shown = None
    while state.requests:
        left = (state.requests, state.movable)
        if left != shown:
            print(f"{name}: {left[0]} requests left, {left[1]} of them movable", flush=True)
            shown = left
        time.sleep(_SECONDS)
        state = next((one for one in listed_instances(base) if one.name == name), state)
    print(f"{name} is empty: stop it, or put it back with `headway drain {name} --undo`")
