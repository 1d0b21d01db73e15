"""A command that serves, and what it answers."""

import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(
    command: list[str], verb: str, config: Path, *more: str
) -> Iterator["subprocess.Popen[str]"]:
    """Run a verb on a deployment until the end."""
    arguments = [*command, verb, "--config", str(config), *more]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process: "subprocess.Popen[str]") -> str:
    """Wait for the next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def answer(url: str, data: bytes | None = None) -> tuple[int, str]:
    """Status and text of an answer to a GET, or to a POST of some data; 0: nobody listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError as error:
        return 0, str(error)
