"""`headway drain`: empty an instance, and see it happen."""

import argparse
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from rescheduler.engines.deployment import read_deployment

__all__ = ["drain"]

_DESCRIPTION = """\
Move all requests away from an instance, so that it can be stopped or upgraded. It gets no new
requests from now on, until --undo. Shows how many are left; Ctrl-C ends the showing only.
"""

_URL = "http://127.0.0.1:8000"
_SECONDS = 0.5
_TIMEOUT = 10.0


def drain(arguments: list[str]) -> None:
    """Run ``headway drain``."""
    parser = argparse.ArgumentParser(prog="headway drain", description=_DESCRIPTION)
    parser.add_argument("instance", help="its name in the deployment")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", type=Path, help="the deployment, to know the proxy's address")
    where.add_argument("--url", default=_URL, help=f"the proxy's address ({_URL})")
    parser.add_argument("--undo", action="store_true", help="let requests come to it again")
    given = parser.parse_args(arguments)
    base = read_deployment(given.config).proxy_url if given.config else given.url.rstrip("/")
    instance = urllib.parse.quote(given.instance, safe="")
    if given.undo:
        _ask(f"{base}/admin/undrain/{instance}", "POST")
        print(f"{instance} takes requests again")
        return
    told = _ask(f"{base}/admin/drain/{instance}", "POST")
    shown = None
    while told["requests"]:
        left = (told["requests"], told["movable"])
        if left != shown:
            print(f"{instance}: {left[0]} requests left, {left[1]} of them can move", flush=True)
            shown = left
        time.sleep(_SECONDS)
        listed = _ask(f"{base}/admin/instances", "GET")["instances"]
        told = next(entry for entry in listed if entry["name"] == instance)
    print(f"{instance} is empty: stop it, or take it back with `headway drain {instance} --undo`")


def _ask(url: str, method: str) -> Any:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"HTTP {error.code}: is that Headway's proxy?"
        raise RuntimeError(message) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise RuntimeError(f"{url}: no answer: {error}; does `headway serve` run?") from error
