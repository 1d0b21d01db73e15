"""What an operator asks a proxy or a coordinator on this machine."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TypeVar

import msgspec

from rescheduler.serving.admin_token import TOKEN_VARIABLE, admin_token

__all__ = ["Listed", "drain_instance", "listed_instances", "undrain_instance"]

Answer = TypeVar("Answer")

_TIMEOUT = 10.0


class Listed(msgspec.Struct):
    """An instance, as whoever places requests sees it.

    Attributes:
        name: its name.
        state: ``closed`` when it is in service, as of a circuit breaker.
        draining: it gets no new requests.
        requests: that are there.
        movable: of these, that can be moved away.
    """

    name: str
    state: str
    draining: bool
    requests: int
    movable: int


class _Instances(msgspec.Struct):
    instances: list[Listed]


def listed_instances(base: str) -> list[Listed]:
    """Return all instances.

    Args:
        base: the admin address.

    Raises:
        RuntimeError: no answer, or none that this operator may have.
    """
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
