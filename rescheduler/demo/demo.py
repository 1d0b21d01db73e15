"""`headway demo`: a load with and without moves, a fleet of emulated GPUs, or a recorded log."""

from pathlib import Path

from rescheduler.engines.deployment import Deployment

_MOST_ENGINES, _MOST_CLIENTS = 64, 2_048


def demo(
    config: Deployment | None = None,
    logs: Path = Path("runs/demo/logs"),
    pairs: int = 10,
    emulate: str | None = None,
    engines: int = 8,
    clients: int = 1_000,
    record: Path | None = None,
    replay: list[Path] | None = None,
    port: int = 8002,
) -> None:
    """Compare a load on two decode engines with and without requests that move between them.

    Starts a small deployment of the embedded model on this machine's CPU and sends it the same
    load twice. Long and short answers are placed in turn. So all long ones meet on one engine,
    whose KV cache holds half of them. First nothing moves; then the planner moves requests,
    without interrupting their streams. Takes about four minutes and 10 GiB of memory on two cores.
    With --config it uses engines that are already running. It prints the address of a page that
    shows in a browser what happens, and in the end a table of both.

    With --emulate it shows a fleet instead, until Ctrl-C: eight engines that emulate a GPU, and a
    thousand requests that run at the same time. Takes two cores and 12 GiB of memory.

    With --replay it shows a recorded log on a page with a time slider, or two side by side, until
    Ctrl-C. Logs are recorded by `headway serve --record FILE` and `headway simulate --record
    FILE`.

    Args:
        config: deployment whose engines are already running.
        logs: folder of the engines' logs.
        pairs: Long requests, and as many short ones.
        emulate: Emulate this GPU: a shipped machine, such as h100x2-llama-70b, or a profile's file.
            Answers are scripted, see docs/rehearse.md.
        engines: Engines of the emulated fleet.
        clients: Clients of the emulated fleet. Each sends one request after the other.
        record: log what the page shows of the emulated fleet to this file, for `--replay`.
        replay: Show this log. A second one is shown beside it.
        port: Serve the page of a replay on this port of this machine. 0 takes a free one.

    Raises:
        ValueError: a number is out of its range, or there is no such GPU.
        LogError: a file to replay is no log, or a damaged one.
        OSError: the file to record to exists, or a file cannot be read or written.
    """
    # Each loads its own: a log is shown at once.
    if replay is not None:
        from rescheduler.serving.replay import replay as show_logs

        if not 1 <= len(replay) <= 2:
            raise ValueError(f"--replay shows one log or two, not {len(replay)}")
        show_logs(replay, port)
    elif emulate is not None:
        from rescheduler.demo.fleet import show_fleet

        if config is not None:
            raise ValueError("--emulate starts engines of its own: leave --config out")
        _check_range("engines", engines, _MOST_ENGINES)
        _check_range("clients", clients, _MOST_CLIENTS)
        show_fleet(emulate, engines, clients, logs, record)
    else:
        from rescheduler.demo.comparison import MOST_PAIRS, compare

        if record is not None:
            raise ValueError("--record is of an emulated fleet: give --emulate, too")
        _check_range("pairs", pairs, MOST_PAIRS)
        compare(config, pairs, logs)


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"--{name} must be between 1 and {most}, not {value}")
