"""How `headway launch --upgrade` asks the launchers that run to start their servers anew.

A launcher listens on a Unix socket in the folder of its logs, for its own user only. The commands
to start come with the request: those of the version and the environment that asks.
"""

import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import LaunchError

_LOOK_SECONDS = 0.25
_ENGINE_SECONDS = 5.0
_LARGEST_ANSWER = 8 << 20
_GAUGES = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)


class Drain(NamedTuple):
    """How an engine is drained before it is stopped.

    Attributes:
        seconds: for which its requests may go on.
        idle_seconds: for which nothing may have run there: by then every proxy knows.
        kept_seconds: the same where it keeps blocks for other engines, by when they expire.
        url: of its HTTP server.
        file: that exists while it drains; its control socket tells the proxies so.
        tell: the command that tells the deployment's proxy, where there is no such socket; the
            option ``--undo`` takes that back.
    """

    seconds: float
    idle_seconds: float
    kept_seconds: float
    url: str
    file: str
    tell: list[str]


class Load(NamedTuple):
    """Requests of an engine that run or wait, and whether its KV cache holds blocks for any."""

    requests: int
    holds: bool


def load_of(url: str) -> Load | None:
    """Return what an engine has left to do, by its metrics; None if it does not say.

    Raises:
        ConnectionRefusedError: nothing listens there.
    """
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_ENGINE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read(_LARGEST_ANSWER).decode(errors="replace")
        found: dict[str, float] = {}
        for name, value in _GAUGES.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        running, waiting = found["num_requests_running"], found["num_requests_waiting"]
        return Load(int(running + waiting), found.get("kv_cache_usage_perc", 0.0) > 0)
    except ConnectionRefusedError:
        raise
    except (OSError, HTTPException, KeyError, ValueError, OverflowError):
        return None
    finally:
        connection.close()


def wait_until_idle(drain: Drain, hurry: threading.Event) -> Load | None:
    """Wait until an engine has nothing left to do, its time is over, or somebody is in a hurry.

    Returns:
        What it had left when it was last seen; None if that is not known.
    """
    deadline = time.monotonic() + drain.seconds
    idle_since: float | None = None
    while True:
        try:
            load = load_of(drain.url)
        except ConnectionRefusedError:  # it has not begun to serve, or has ended
            return Load(0, False)
        now = time.monotonic()
        if load is None or load.requests:
            idle_since = None
        else:
            idle_since = now if idle_since is None else idle_since
            if now - idle_since >= (drain.kept_seconds if load.holds else drain.idle_seconds):
                return load
        if now >= deadline or hurry.wait(_LOOK_SECONDS):
            return load


_LARGEST_PLAN = 16 << 20
_ANSWER_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")  # of a peer: its process, user and group


class PlannedServer(msgspec.Struct, frozen=True):
    """A server to start: see `rescheduler.engines.launch_process.ServerProcess`."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    url: str
    interpreter: str
    drain: Drain | None = None


class Plan(msgspec.Struct, frozen=True):
    """Servers to start anew, those of them that the launcher runs, in this order."""

    servers: list[PlannedServer]


class _Said(msgspec.Struct, frozen=True):
    """What a launcher says: a line, or how it ended, with the names of the servers it has seen to.

    An error that is not empty says why the others were left as they were.
    """

    line: str = ""
    ended: bool = False
    error: str = ""
    names: list[str] = []


class UpgradeRequest:
    """What somebody asks of this launcher, who waits for the end.

    Attributes:
        plan: the request.
        is_wanted: whether somebody still waits.
    """

    def __init__(self, connection: socket.socket, plan: Plan) -> None:
        self.plan, self.is_wanted = plan, True
        self._connection = connection

    def say(self, line: str) -> None:
        """Send a line of progress."""
        self._send(_Said(line=line))

    def end(self, names: list[str], error: str = "") -> None:
        """Report which servers were restarted, and the error that stopped the rest."""
        self._send(_Said(ended=True, error=error, names=names))
        self._connection.close()

    def _send(self, said: _Said) -> None:
        try:
            self._connection.sendall(msgspec.json.encode(said) + b"\n")
        except OSError:
            self.is_wanted = False


class Requests:
    """Hears whoever asks this launcher for an upgrade."""

    def __init__(self, listening: socket.socket | None) -> None:
        self._listening = listening

    @classmethod
    @contextmanager
    def heard(cls, logs: Path) -> Iterator["Requests"]:
        """Listen in a folder while the body runs; where no socket can be, nobody is heard."""
        path = logs / f"launch-{os.getpid()}.sock"
        with closing(socket.socket(socket.AF_UNIX)) as listening:
            try:
                path.unlink(missing_ok=True)  # of a process that had this number before
                with _short(path) as address:
                    listening.bind(address)
                path.chmod(0o600)
                listening.listen()
            except OSError as error:
                print(f"headway launch: {path}: {error}: no upgrades", file=sys.stderr, flush=True)
                yield cls(None)
                return
            try:
                yield cls(listening)
            finally:
                path.unlink(missing_ok=True)

    def wait(self, seconds: float) -> UpgradeRequest | None:
        """Return the next request, if one comes in time."""
        if self._listening is None:
            time.sleep(seconds)
            return None
        self._listening.settimeout(seconds)
        try:
            connection, _ = self._listening.accept()
        except TimeoutError:
            return None
        try:
            connection.settimeout(_ANSWER_SECONDS)
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(peer)[1] not in (os.getuid(), 0):
                raise ValueError("another user's")
            with connection.makefile("rb") as lines:
                plan = msgspec.json.decode(lines.readline(_LARGEST_PLAN), type=Plan)
        except (OSError, ValueError):
            connection.close()
            return None
        return UpgradeRequest(connection, plan)


def ask_to_upgrade(logs: Path, plan: Plan, said: Callable[[str], None]) -> set[str]:
    """Have the launchers with logs in a folder start servers anew, and wait until they have.

    Returns:
        The names of those that were.

    Raises:
        LaunchError: no launcher runs there, or one could not go on: the rest is as it was.
    """
    done: set[str] = set()
    heard = False
    for path in sorted(logs.glob("launch-*.sock")):
        with closing(socket.socket(socket.AF_UNIX)) as connection:
            try:
                with _short(path) as address:
                    connection.connect(address)
            except (ConnectionRefusedError, FileNotFoundError):  # of a launcher that was killed
                path.unlink(missing_ok=True)
                continue
            heard = True
            connection.sendall(msgspec.json.encode(plan) + b"\n")
            done |= _followed(connection, said)
    if not heard:
        raise LaunchError(
            f"no `headway launch` of this user has its logs in {logs}: start one, or give the "
            "folder of one that runs as --logs"
        )
    return done


def _followed(connection: socket.socket, said: Callable[[str], None]) -> set[str]:
    with connection.makefile("rb") as lines:
        for line in lines:
            heard = msgspec.json.decode(line, type=_Said)
            if heard.error:
                raise LaunchError(heard.error)
            if heard.ended:
                return set(heard.names)
            said(heard.line)
    raise LaunchError("the launcher has ended, or does not take requests of this version")


def refuse_other_addresses(running: Deployment, wanted: Deployment) -> None:
    """Refuse to start under another address what others know by the one that it has.

    Raises:
        LaunchError: names what has changed.
    """

    def addresses(deployment: Deployment) -> list[tuple[object, ...]]:
        ports = "the proxy", deployment.proxy.host, deployment.proxy.port
        engines = [
            (one.name, one.role, one.url, one.control, one.telemetry)
            for one in deployment.instances
        ]
        return [*engines, (*ports, deployment.proxy.admin_port)]

    before, now = addresses(running), addresses(wanted)
    changed = [one for one in before if one not in now] + [one for one in now if one not in before]
    if changed:
        raise LaunchError(
            f"{changed[0][0]}: an upgrade keeps the instances, their roles and all addresses; to "
            "change them, stop the deployment and launch it again"
        )


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield an address of a Unix socket that is short enough, however long its folder's name."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        with suppress(OSError):
            os.close(folder)
