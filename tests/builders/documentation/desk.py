"""A folder in which the commands of a page are run: the repository's files, and stand-ins."""

import contextlib
import gzip
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from checked_commands import VLLM, check_words, exit_status, programs_of
from chosen_ports import free_port
from made_up_cluster import MadeUpCluster
from recorded_dataset import new_session, record
from shown_commands import ROOT, RUN, Block, How, Page, Shown
from training_runs import FEW_ROWS, SURVIVAL, fit

from data_collection.models import prepare_embedded

StandIn = Callable[[Path], None]

_KEPT = ("charts", "checkpoints", "configs", "deploy", "examples", "recordings", "transcripts")
_WRITTEN = ("benchmarks/results", "docs/papers")
"""Folders of the repository that its own commands write to: here they are others."""

_SERVING = {
    "serve": "serving on",
    "coordinator": "coordinating on",
    "picker": "picking on",
    "demo --replay": "see it: ",
    "launch": "Ctrl-C stops them",
}
"""Commands that run until Ctrl-C, and what each prints once it is ready."""

_PATIENCE = 600.0


class Desk:
    """A folder with what the commands of a page name, on ports of its own."""

    def __init__(
        self,
        folder: Path,
        page: Page,
        more: Mapping[str, StandIn] = {},
        ports: Mapping[int, int] = {},
    ) -> None:
        self.folder, self.ports = folder, ports
        (folder / "desk").mkdir()
        self.path = folder / "desk"
        makers = STAND_INS | more
        taken = {name.partition("/")[0] for name in page.stand_ins}
        for name in _KEPT:
            if name not in taken:
                (self.path / name).symlink_to(ROOT / name)
            elif (ROOT / name).exists():
                _link_all(ROOT / name, self.path / name)
        for name in _WRITTEN:
            (self.path / name).mkdir(parents=True)
        for name in ("pyproject.toml", "Makefile"):
            (self.path / name).symlink_to(ROOT / name)
        for name, kind in page.stand_ins.items():
            assert kind in makers, f"{page.name}: {name}: nothing here stands for {kind}"
            (self.path / name).unlink(missing_ok=True)
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            makers[kind](self.path / name)
        for block in page.blocks:
            for how in block.hows:
                if how.kind == "file":
                    (self.path / how.text.partition(" for ")[0]).write_text(block.text)
        for block in page.blocks:
            if block.kind == "added":
                with (self.path / block.hows[0].text).open("a") as file:
                    file.write(block.text)

    def check(self, command: Shown) -> list[list[str]]:
        """Check that a command's programs would accept what it gives them; return them."""
        programs = programs_of(self._whole(command), self.folder)
        for words in programs:
            check_words(words)
        return programs

    def check_file(self, how: How) -> None:
        """Check that the verb that a file is for reads it."""
        name, _, verb = how.text.partition(" for ")
        check_words(["headway", *(verb or "launch").split(), "--config", name])

    def run(self, command: Shown, beside: ExitStack) -> str:
        """Run a command as a shell does, and return what it printed.

        One that serves until Ctrl-C is ready then, and ended when the others are closed.
        """
        text = self._moved(self._whole(command))
        words = shlex.split(text)
        verb = words[1] if words[0] == "headway" else ""
        starts = (start for start in _SERVING if text.startswith(f"headway {start} "))
        if "--print" not in words and (serves := next(starts, None)):
            return str(beside.enter_context(self._serving(text, _SERVING[serves])))
        if words[:3] == ["python", "-m", VLLM]:
            ready = "Application startup complete"
            return str(beside.enter_context(self._serving(text, ready)))
        if verb and not re.search(r"[$;|&<>]", text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                status = exit_status(*words[1:])
            assert status == 0, f"{command.text}\n{printed.getvalue()[-3000:]}"
            return printed.getvalue()
        done = subprocess.run(
            ["/bin/bash", "-euc", text],
            cwd=self.path,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command.text}\n{done.stdout[-3000:]}"
        return done.stdout

    def run_python(self, block: Block) -> None:
        """Run a block of Python in a process of its own."""
        (self.path / "block.py").write_text(block.text)
        with ExitStack() as nothing:
            self.run(Shown("python block.py", How("run", "")), nothing)

    def _whole(self, command: Shown) -> str:
        """Return a command with the options that the page gives to its test, and no comment."""
        text = command.text.replace("\\\n", " ")
        if "\n" not in text:
            text = re.sub(r"\s+# .*", "", text)
        how = command.how
        return text + how.text.removeprefix("with") if how.kind in RUN else text

    def _moved(self, text: str) -> str:
        return re.sub(
            r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d+",
            lambda port: str(self.ports.get(int(port[0]), port[0])),
            text,
        )

    @contextmanager
    def _serving(self, text: str, ready: str) -> Iterator[str]:
        log = self.folder / f"printed-{len(list(self.folder.glob('printed-*')))}"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["/bin/bash", "-euc", f"exec {text}"],
                cwd=self.path,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline = time.monotonic() + _PATIENCE
            while not ((printed := log.read_text()) and ready in printed):
                assert process.poll() is None, f"{text}\n{printed}"
                assert time.monotonic() < deadline, f"{text}: never ready\n{printed}"
                time.sleep(0.05)
            yield printed
            process.send_signal(signal.SIGINT)
            status = process.wait(timeout=_PATIENCE)
            assert status in (0, 130), f"{text}\n{log.read_text()[-3000:]}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        programs = self.path / "bin"
        if not programs.exists():
            programs.mkdir()
            for name, program in {
                "headway": f"{sys.executable} -m rescheduler",
                "python": sys.executable,
                "curl": f"{shutil.which('curl')} --fail-with-body --no-progress-meter",
            }.items():
                (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
                (programs / name).chmod(0o755)
        paths = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        modules = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(modules)}


@contextmanager
def laid(folder: Path, page: Page, *more: object) -> Iterator[Desk]:
    """Lay a desk, and work at it."""
    desk = Desk(folder, page, *more)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk.path)
        yield desk


def _link_all(source: Path, target: Path) -> None:
    """Make a folder like another one, with links to its files."""
    for path in source.rglob("*"):
        linked = target / path.relative_to(source)
        if path.is_file():
            linked.parent.mkdir(parents=True, exist_ok=True)
            linked.symlink_to(path)


def _trace(path: Path) -> None:
    lines = ["arrival_s,input_tokens,output_tokens"]
    lines += [f"{i / 5:.1f},{20 + i * 37 % 900},{5 + i * 53 % 300}" for i in range(400)]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


def _traces(path: Path) -> None:
    path.mkdir()
    _trace(path / "some.csv.gz")


def _conversations(path: Path) -> None:
    """Requests of 40 conversations, whose prompts begin with all that was said before."""
    lines = []
    for i in range(700):
        turn, one = divmod(i, 40)
        lines.append(
            {
                "timestamp": 200 * i,
                "input_length": 512 * turn + 300,
                "output_length": 20 + one,
                "hash_ids": [100 * one + block for block in range(turn + 1)],
            }
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()))


def _dataset(path: Path) -> None:
    record(path, new_session(f"20250101T000000-{sum(path.name.encode())}"), prefix=path.name)


def _checkpoint(path: Path) -> None:
    _dataset(path.with_name("trained-on"))
    fit("survival", path.with_name("trained-on"), path, *SURVIVAL, *FEW_ROWS)


def _regressor(path: Path) -> None:
    _dataset(path.with_name("trained-on"))
    fit("star", path.with_name("trained-on"), path, *FEW_ROWS)


def _prompts(path: Path) -> None:
    described = {"task": "story", "source": "us", "licence": "MIT"}
    prompts = ({"id": f"p{i}", "prompt": f"Tell me of {i}."} | described for i in range(8))
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


def _deployment(path: Path) -> None:
    """Two engines that decode, and do not answer, on ports that are free."""
    path.write_text(
        "model: smollm2\n"
        f"proxy: {{port: {free_port()}, admin_port: {free_port()}}}\n"
        "instances:\n"
        f'  - {{name: decode-0, role: decode, url: "http://127.0.0.1:{free_port()}"}}\n'
        f'  - {{name: decode-1, role: decode, url: "http://127.0.0.1:{free_port()}"}}\n'
    )


def _model(path: Path) -> None:
    path.symlink_to(prepare_embedded("smollm2"))


def _log(path: Path) -> None:
    MadeUpCluster(2, 3, 4096).record(path)


STAND_INS: dict[str, StandIn] = {
    "a trace": _trace,
    "a trace of conversations": _conversations,
    "a folder of traces": _traces,
    "a dataset": _dataset,
    "a checkpoint": _checkpoint,
    "a checkpoint of STAR": _regressor,
    "a file of prompts": _prompts,
    "a deployment": _deployment,
    "the deployment": _deployment,
    "a log": _log,
    "the model": _model,
}
"""What a page calls a file -> what makes one."""
