"""A deployment on a Ray cluster of two nodes: comes up, outlives deaths and restarts, goes away."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import ray
import yaml
from forked_vllm import free_port
from moving import STORY
from process_groups import processes_in
from proxying import At, chunks_of, text_of
from ray.cluster_utils import Cluster
from running_deployment import ENGINE, PATIENT

from rescheduler.engines.deployment import Deployment, read_deployment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings(r"ignore:::ray(\..*)?$"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

LONG = {"prompt": STORY, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
SERVERS = ["coordinator", "decode-0", "decode-1", "proxy-0", "proxy-1"]
MANY = 600.0
"""Seconds for anything: only what never happens takes longer."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster of two nodes, each with an address of its own that only this machine reaches."""
    size = {"num_cpus": 4, "object_store_memory": 80_000_000}
    head = {**size, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        # Else Ray ends actors when anything on this machine, whatever it is, fills the memory.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**size, node_ip_address="127.0.0.3")
            yield cluster.address
        finally:
            cluster.shutdown()


class OnRay:
    """The commands, on one deployment."""

    def __init__(self, command: list[str], folder: Path, **ray: Any) -> None:
        self.logs = folder / "logs"
        self._command, self._config = command, folder / "deployment.yaml"
        described = {
            "model": "smollm2",
            "ray": {"instances": [{"role": "decode", "replicas": 2}], "proxies": 2, **ray},
            "proxy": {**msgspec.to_builtins(PATIENT), "port": 0, "admin_port": free_port()},
            "engine": msgspec.to_builtins(ENGINE),
        }
        self._config.write_text(yaml.safe_dump(described))

    def begin(self, verb: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [*self._command, "ray", verb, "--config", str(self._config), *arguments]
        if verb == "launch":
            command += ["--logs", str(self.logs)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, verb: str, *arguments: str) -> tuple[int, str]:
        """Return a command's exit status and what it printed."""
        process = self.begin(verb, *arguments)
        try:
            printed, _ = process.communicate(timeout=MANY)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{verb} does not end: {process.communicate()[0]}") from None
        return process.returncode, printed

    @property
    def deployment(self) -> Deployment:
        return read_deployment(self.logs / "deployment.yaml")

    def status(self) -> dict[str, list[str]]:
        """What `headway ray status` says of each server: state, address, restarts, requests."""
        lines = [line.split() for line in self.run("status")[1].splitlines()]
        return {words[0]: words[1:] for words in lines if words and words[0] in SERVERS}

    def until(self, name: str, restarts: int) -> None:
        """Wait until a server is ready, after at least so many restarts."""
        deadline = time.monotonic() + MANY
        while True:
            shown = self.status()
            state = shown.get(name, [])
            if state[:1] == ["ready"] and int(state[2]) >= restarts:
                return
            assert time.monotonic() < deadline, f"{name} is not back: {shown}"

    def groups(self) -> dict[str, psutil.Process]:
        """The leaders of the servers' process groups, of those that run."""
        marks = {str(self.logs / f"{name}.yaml"): name for name in SERVERS}
        marks |= {str(one.port): one.name for one in self.deployment.instances}
        found = {}
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if "rescheduler.engines.tether" in line:
                found |= {marks[word]: process for word in line if word in marks}
        return found


async def stream(url: str, at: At | None = None) -> str:
    """The text of a stream; ``at`` is called with the number of chunks so far."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=MANY)) as session:
        return text_of(await chunks_of(session, f"{url}/v1/completions", LONG, at))


def killing(process: psutil.Process) -> At:
    """Kill a process after ten chunks, as a crash would."""

    async def at(chunks: int) -> None:
        if chunks == 10:
            process.send_signal(signal.SIGKILL)

    return at


def actor_of(leader: psutil.Process) -> psutil.Process:
    """The process of the actor that keeps a server running."""
    actor = leader.parent()
    assert actor is not None and "ray::" in " ".join(actor.cmdline())
    return actor


def until_gone(group: int) -> None:
    deadline = time.monotonic() + MANY
    while processes_in(group):
        assert time.monotonic() < deadline, f"outlived their actor: {processes_in(group)}"
        time.sleep(0.1)


def test_what_the_cluster_has_not_is_named(
    address: str, headway_command: list[str], tmp_path: Path
) -> None:
    wanted = [{"role": "decode", "replicas": 2, "num_gpus": 1, "num_cpus": 9}]
    on_ray = OnRay(headway_command, tmp_path, address=address, instances=wanted, reserve_seconds=1)
    status, printed = on_ray.run("launch")
    assert status == 1
    assert "2 GPU are needed, 0 are free" in printed
    assert "127.0.0.3 has 4 CPU" in printed
    assert "no deployment runs" in on_ray.run("status")[1], "nothing stays reserved"


def test_a_server_that_cannot_begin_says_why(
    address: str, headway_command: list[str], tmp_path: Path
) -> None:
    on_ray = OnRay(headway_command, tmp_path, address=address)
    (on_ray.logs / "decode-1.yaml" / "in the way").mkdir(parents=True)
    status, printed = on_ray.run("launch")
    assert status == 1
    assert "decode-1 cannot be started: " in printed and "decode-1.yaml" in printed
    assert "no deployment runs" in on_ray.run("status")[1]


@pytest.fixture
def stranger(address: str) -> Iterator[str]:
    """Namespace of an actor that is no deployment's, though it is called like an engine."""
    namespace = "strangers"

    class Stranger:
        def stop(self) -> None:
            raise AssertionError("not for you")

    ray.init(address=address, namespace=namespace, log_to_driver=False)
    actor = ray.remote(Stranger).options(name="decode-1", num_cpus=0).remote()
    try:
        yield namespace
        assert ray.get_actor("decode-1") == actor
    finally:
        ray.shutdown()


def test_what_others_run_in_its_namespace_is_left_alone(
    address: str, headway_command: list[str], tmp_path: Path, stranger: str
) -> None:
    on_ray = OnRay(headway_command, tmp_path, address=address, namespace=stranger)
    for verb in ("status", "restart", "stop"):
        status, printed = on_ray.run(verb)
        assert status == 1 and "no deployment runs in namespace" in printed
    status, printed = on_ray.run("launch")
    assert status == 1
    assert "another actor in namespace 'strangers' is called decode-1" in printed
    assert "no deployment runs" in on_ray.run("status")[1]


def test_a_launch_that_is_stopped_while_engines_load_leaves_nothing(
    address: str, headway_command: list[str], tmp_path: Path
) -> None:
    on_ray = OnRay(headway_command, tmp_path, address=address)
    process = on_ray.begin("launch")
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if "decode-1 starting" in line:
            break
    process.terminate()
    rest, _ = process.communicate(timeout=MANY)
    assert process.returncode == 130, printed + rest
    assert "no deployment runs" in on_ray.run("status")[1]
    assert on_ray.groups() == {}


def test_a_deployment_outlives_deaths_and_restarts(
    address: str, headway_command: list[str], tmp_path: Path
) -> None:
    on_ray = OnRay(headway_command, tmp_path, address=address)
    status, printed = on_ray.run("launch")
    assert status == 0, printed
    try:
        walk_through(on_ray)
    finally:
        running = [leader.pid for leader in on_ray.groups().values()]
        status, printed = on_ray.run("stop")
    assert status == 0, printed
    assert len(running) == len(SERVERS)
    assert not any(map(processes_in, running))
    assert "no deployment runs" in on_ray.run("status")[1]


def walk_through(on_ray: OnRay) -> None:
    deployment, shown = on_ray.deployment, on_ray.status()
    assert {instance.host for instance in deployment.instances} == {"127.0.0.2", "127.0.0.3"}
    first, second = shown["proxy-0"][1], shown["proxy-1"][1]
    expected = asyncio.run(stream(deployment.decode[0].url))

    status, printed = on_ray.run("launch")
    assert status == 1 and "a deployment runs in namespace 'headway' already" in printed

    restarting = on_ray.begin("restart", "--only", "decode-0")

    async def streams_while_it_restarts() -> list[str]:
        found = []
        async with asyncio.timeout(MANY):
            while restarting.poll() is None:
                found += await asyncio.gather(*map(stream, (first, second, first)))
        return found

    assert set(asyncio.run(streams_while_it_restarts())) <= {expected}
    printed, _ = restarting.communicate(timeout=MANY)
    assert restarting.returncode == 0 and "decode-0 is in service again" in printed, printed
    on_ray.until("decode-0", restarts=1)

    status, printed = on_ray.run("restart", "--only", "proxy-1")
    assert status == 0 and "proxy-1 serves again" in printed, printed
    assert asyncio.run(stream(second)) == expected

    coordinator = on_ray.groups()["coordinator"]
    assert asyncio.run(stream(first, killing(actor_of(coordinator)))) == expected
    until_gone(coordinator.pid)
    on_ray.until("coordinator", restarts=1)

    (serve,) = on_ray.groups()["proxy-1"].children()

    async def one_of_two() -> str:
        other = asyncio.create_task(stream(first))
        with pytest.raises(aiohttp.ClientError):
            await stream(second, killing(serve))
        return await other

    assert asyncio.run(one_of_two()) == expected
    on_ray.until("proxy-1", restarts=2)

    engine = on_ray.groups()["decode-1"]

    async def on_both_engines() -> list[str]:
        return await asyncio.gather(stream(first), stream(second, killing(actor_of(engine))))

    assert asyncio.run(on_both_engines()) == [expected, expected]
    until_gone(engine.pid)
    on_ray.until("decode-1", restarts=1)
    assert asyncio.run(stream(second)) == expected
