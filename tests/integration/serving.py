"""A vLLM API server as a test starts it: a port, a request, readiness."""

import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["free_port", "post", "wait_until_ready"]

START_SECONDS = 300


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any], **options: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, **options)


def wait_until_ready(port: int, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])
