"""A server that says how many requests it has, as an engine's metrics do, and obeys a file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_upgrade import Drain

BUSY = """
import http.server, os, pathlib, signal, sys
port, left, word = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        requests, holds = left.read_text().split()
        text = f'vllm:num_requests_running{{engine="0",model_name="a}} 7"}} {requests}.0\\n'
        text += 'vllm:num_requests_waiting{engine="0"} 0.0\\n'
        text += 'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\\n'
        text += f'vllm:kv_cache_usage_perc{{engine="0"}} {holds}\\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode() if self.path == "/metrics" else word.encode())
    def log_message(self, *args):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked to end", flush=True)))
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Engine)
print("serves", os.environ.get("HEADWAY_DRAINING_FILE"), flush=True)
server.serve_forever()
"""
"""``/metrics`` has the two numbers of a file: requests, and the share of the KV cache."""


def busy(left: Path, requests: int, holds: float = 0.0) -> None:
    """Set how many requests the server has left."""
    ready = left.with_suffix(".new")
    ready.write_text(f"{requests} {holds}")
    ready.replace(left)


def draining_server(
    folder: Path,
    port: int,
    name: str = "decode-0",
    seconds: float = 600.0,
    idle_seconds: float = 0.3,
    kept_seconds: float = 1.0,
    word: str = "old",
    tell: Sequence[str] = (),
) -> ServerProcess:
    """Return such a server, which is drained before it ends; its file is ``NAME.left``."""
    url, left = f"http://127.0.0.1:{port}", folder / f"{name}.left"
    file = str(folder / f"{name}.draining")
    drain = Drain(seconds, idle_seconds, kept_seconds, url, file, [*tell])
    command = EngineCommand([sys.executable, "-c", BUSY, str(port), str(left), word], {})
    return ServerProcess(name, command, url, folder / f"{name}.log", drain=drain)
