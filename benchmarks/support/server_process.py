"""A server that a benchmark runs as a process of its own, and what it costs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_WITHOUT_UVLOOP = (
    "import sys; sys.modules['uvloop'] = None; "  # so that importing it fails, as if not installed
    "from rescheduler.commands.command_line import main; sys.exit(main())"
)


@dataclass(frozen=True)
class ServerProcess:
    pid: int
    said: str

    @property
    def port(self) -> int:
        """That it listens on: the end of its first line."""
        return int(self.said.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_kib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1024

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@contextmanager
def server(
    command: Sequence[str], logs: bool = True, checkout: Path | None = None
) -> Iterator[ServerProcess]:
    """Run a server that prints a line once it listens, of another checkout if one is given."""
    errors = None if logs else subprocess.DEVNULL
    environment = None if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=checkout, env=environment
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if not said:
            raise RuntimeError(f"{' '.join(command)}: ended with {process.wait()}")
        yield ServerProcess(process.pid, said)
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def headway(
    command: str,
    deployment: Mapping[str, Any],
    *options: str,
    uvloop: bool = True,
    logs: bool = True,
    checkout: Path | None = None,
) -> Iterator[ServerProcess]:
    """Run a command of `headway` that serves a deployment, of another checkout if one is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deployment.yaml"
        path.write_text(yaml.safe_dump(dict(deployment)))
        start = ["-m", "rescheduler"] if uvloop else ["-c", _WITHOUT_UVLOOP]
        whole = [sys.executable, *start, command, "--config", str(path), *options]
        with server(whole, logs, checkout) as process:
            yield process


@contextmanager
def stream_players(token_seconds: float, *names: str) -> Iterator[list[dict[str, str]]]:
    """Run engines that play streams with so long between two tokens, as a deployment lists them."""
    command = [sys.executable, "-m", "benchmarks.support.stream_player"]
    with ExitStack() as stack:
        instances = []
        for name in names:
            player = server([*command, "--token-seconds", str(token_seconds)])
            url = stack.enter_context(player).url
            instances.append({"name": name, "role": name.partition("-")[0], "url": url})
        yield instances
