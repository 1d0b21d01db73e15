"""`headway replay`, and the logs of `headway simulate --record` that it shows."""

import gzip
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from made_up_cluster import MadeUpCluster

from rescheduler.commands.command_line import main
from rescheduler.page.snapshot import LogWriter, Phase, Snapshot, read_log

SMALL = {
    "cluster": {"instances": 2, "slots": 4, "kv_capacity": 2000},
    "trace": {"name": "geometric", "requests": 80, "mean_prompt": 50, "mean_output": 40.0},
    "arrivals": {"kind": "poisson", "rate": 20.0},
    "clock": "independent",
    "forecast": {"name": "kaplan_meier"},
    "policies": ["round_robin"],
    "migration": {"planners": ["none", "survival"]},
    "seeds": 2,
}


def exit_status(*arguments: str | Path) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:  # jsonargparse ends the process itself
        return int(end.code or 0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path, source = tmp_path / "a.jsonl.gz", MadeUpCluster(2, 3, 4096)
    with LogWriter(path, source.about) as writer:
        for _ in range(3):
            writer.write(msgspec.json.encode(source.look().snapshot()))
    return path


def get(url: str, token: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def replaying(command: list[str], log: Path, beside: Path) -> Iterator[tuple[str, str]]:
    """Run the command; yield the address, and the token."""
    process = subprocess.Popen(
        [*command, "replay", str(log), "--beside", str(beside), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[-1].startswith("see it: http://127.0.0.1:"), said
        url, _, token = said[-1].split()[-1].partition("/ui#token=")
        yield url, token
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()


def test_two_logs_are_served_to_who_has_the_token(headway_command: list[str], log: Path) -> None:
    with replaying(headway_command, log, log) as (url, token):
        with urllib.request.urlopen(f"{url}/ui") as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert get(f"{url}/admin/page")[0] == 401
        assert get(f"{url}/admin/snapshots/0/0")[0] == 401
        page = json.loads(get(f"{url}/admin/page", token)[1])
        assert page["shows"] == "replay"
        assert [shown["times"] for shown in page["logs"]] == [[0.0, 0.5, 1.0]] * 2
        status, packed = get(f"{url}/admin/snapshots/1/2", token)
        assert status == 200
        assert msgspec.json.decode(gzip.decompress(packed), type=Snapshot).time == 1.5
        for path in ("2/0", "0/3", "0/99999999"):
            assert get(f"{url}/admin/snapshots/{path}", token)[0] == 404


def test_mistakes_are_said_in_a_line(
    tmp_path: Path, log: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other.csv"
    empty.touch()
    other.write_text("a,b\n1,2\n")
    for arguments, says in (
        ([empty], "is empty: was it recorded with --record?"),
        ([other], "is not a log of `headway serve` or `headway simulate --record`"),
        ([tmp_path / "none"], "none does not exist"),
        ([log, "--beside", empty], "is empty: was it recorded with --record?"),
        ([log, "--port", "70000"], "a port is a number from 0 to 65535"),
        (
            ["--config", small, "--record", tmp_path / "a.gz", "--record-every", "0"],
            "--record-every must be above 0 seconds",
        ),
    ):
        assert exit_status("simulate" if small in arguments else "replay", *arguments) == 1
        errors = capsys.readouterr().err
        assert says in errors
        assert errors.count("\n") == 1


def test_simulations_are_recorded_as_they_are_without(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def simulated(*more: str | Path) -> dict[str, Any]:
        written = tmp_path / "figures.json"
        assert exit_status("simulate", "--config", small, "--json", written, *more) == 0
        figures: dict[str, Any] = json.loads(written.read_text())
        return {name: value for name, value in figures.items() if name != "_about"}

    record = tmp_path / "logs" / "run.jsonl.gz"
    recorded = simulated("--record", record, "--record-every", "0.02")
    printed = capsys.readouterr().out
    assert recorded == simulated()
    paths = sorted(record.parent.iterdir())
    assert len(paths) == len(recorded) == 2
    for path in paths:
        assert f"wrote {path}" in printed
        log = read_log(path)
        assert log.about.source == "simulation"
        assert log.times[:3] == [0.0, 0.02, 0.04]
        seen = [log.snapshot(i) for i in range(len(log.times))]
        numbers = {number for snapshot in seen for number in snapshot.requests.number}
        assert numbers <= set(range(80))
        assert len(numbers) > 40
        assert all(one.finishes is one.outlook is None for one in seen), "nobody forecasts them"
        for snapshot in seen:
            columns = snapshot.requests
            for g, instance in enumerate(snapshot.instances):
                held = sum(
                    prompt + generated
                    for at, prompt, generated in zip(
                        columns.instance, columns.prompt, columns.generated, strict=True
                    )
                    if at == g
                )
                assert instance.kv_tokens == held
                assert len(instance.ahead) == len(snapshot.points) > 0
            waits = [phase == Phase.WAITING for phase in columns.phase]
            assert waits == [at < 0 for at in columns.instance]
        steps = [one.step_seconds for snapshot in seen for one in snapshot.instances]
        assert any(steps)
        assert all(step is None or step > 0 for step in steps)
        joules = [snapshot.joules for snapshot in seen]
        assert joules == sorted(joules)
        figure = recorded[log.about.title]["energy"]
        assert 0.8 * figure < joules[-1] < 1.2 * figure  # of both seeds, the log is of the first
        moves = {(move.number, move.time) for snapshot in seen for move in snapshot.moves}
        assert bool(moves) == (log.about.migration == "survival")
