"""The commands of pages that take minutes, and every benchmark: `make nightly`."""

import ast
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from chosen_ports import free_port
from desk import Desk, laid
from shown_commands import PAGES, ROOT, How, Shown, read_page

pytestmark = pytest.mark.timeout(7200)

SHOWING = [path for path in PAGES if read_page(path).shown("nightly")]
DEFAULT_PORTS = (8000, 8001)
BENCHMARKS = {
    path.stem if path.name != "__main__.py" else path.parent.name: path
    for path in sorted((ROOT / "benchmarks").glob("**/*.py"))
    if path.parent.name != "support" and 'if __name__ == "__main__"' in path.read_text()
}
del BENCHMARKS["equality"]  # it needs a deployment that runs: docs/equality.md starts one
INSTEAD = {
    "compatibility": "--models qwen3",
    "emulator_check": "--requests 60 --out runs/emulator_check",
    "emulated_past": "--quick --trace mooncake_conversation.jsonl.gz",
    "fairbatching_live": "--quick --trace TRACE",
    "gpu_check": "--device cpu",
    "engine_cost": "--quick --requests 8 --k 2",
    "leaks": "--requests 5000",
    "victims": "runs/victims",
    "vllm_symbols": "0.31 0.32",
    "worth": "order --quick",
}
"""Arguments of those that have no short run, or read something."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one benchmark measures, another one reads."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page(path: Path, tmp_path: Path, kept: Path) -> None:
    """Those that take seconds too: the others read what they write."""
    page = read_page(path)
    ports = {port: free_port() for port in DEFAULT_PORTS}
    with laid(tmp_path, page, {}, ports) as desk, ExitStack() as beside:
        keep(desk, kept)
        for block in page.blocks:
            for command in block.commands:
                if command.how.kind in ("run", "nightly"):
                    desk.run(command, beside)
            if block.kind == "nightly" and block.language == "python":
                desk.run_python(block)


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_benchmark_runs(name: str, tmp_path: Path, kept: Path) -> None:
    page = read_page(ROOT / "README.md")
    page.stand_ins = {
        "TRACE": "a trace",
        "mooncake_conversation.jsonl.gz": "a trace of conversations",
    }
    described = ast.get_docstring(ast.parse(BENCHMARKS[name].read_text())) or ""
    assert f"python -m benchmarks.{name}" in described
    more = INSTEAD.get(name, "--quick")
    if re.search(r"--json OUT", described):
        more += " --json figures.json"
    with laid(tmp_path, page) as desk, ExitStack() as beside:
        keep(desk, kept)
        desk.run(Shown(f"python -m benchmarks.{name} {more}", How("nightly", "")), beside)
        if "--json" in more:
            assert Path("figures.json").read_text().startswith("{")


def keep(desk: Desk, kept: Path) -> None:
    """Have a desk's folder of runs be the one that is kept, as far as nothing stands in it."""
    if not (desk.path / "runs").exists():
        (desk.path / "runs").symlink_to(kept)
