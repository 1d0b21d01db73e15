"""Every command and Python block that pages and programs show: it runs, or is parsed."""

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_commands import UNCHECKED, check_mention, check_words, programs_of
from desk import laid
from google.protobuf.json_format import MessageToJson
from matplotlib import pyplot
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from recorded_dataset import record
from shown_commands import PAGES, PYTHON, ROOT, How, read_page, spans_in
from vllm.tracing import SpanAttributes

from rescheduler.commands.command_line import _USAGE
from rescheduler.simulator.workloads.trace_files import TraceFile

DOCS = ROOT / "docs"
FOLDERS = (
    "benchmarks|charts|checkpoints|configs|data_collection|deploy|docs|examples|predictor|"
    "rescheduler|tests"
)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def python_blocks(page: str | Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def executed(*blocks: str, **given: Any) -> dict[str, Any]:
    """Run blocks of Python one after the other; return all names, with those given before."""
    for block in blocks:
        exec(block, given)
    return given


def test_the_readme_forecasts_as_it_says() -> None:
    (block,) = python_blocks("../README.md")
    names = executed(block)
    assert names["still_running"].shape == (1,)
    assert 0 < names["still_running"][0] < 1
    early, middle, late = names["quantiles"][0]
    assert 0 < early <= middle <= late <= 824 - 50


def test_the_forecast_page_loads_and_forecasts() -> None:
    forecast = executed(python_blocks("forecast.md")[0])["forecast"]
    survival = forecast.at([0, 16, 64])
    assert survival.shape == (2, 3)
    assert (survival[:, 0] == 1).all()
    assert (np.diff(survival) <= 0).all()
    np.testing.assert_allclose(
        forecast.aged(10).at([6])[:, 0] * forecast.at([10])[:, 0], survival[:, 1]
    )


def test_the_forecast_page_computes_what_it_says() -> None:
    _, block = python_blocks("forecast.md")
    forecast = executed(block)["forecast"]
    np.testing.assert_allclose(forecast.at([0, 10, 50]), [[1, 0.6, 1 / 3]])
    assert "# [[1, 0.6, 0.333...]]" in block


def test_the_routing_page_assigns_as_it_says() -> None:
    blocks = python_blocks("route.md")
    names = executed(*blocks)
    assert f"# {names['now'].tolist()}\n" in blocks[0]
    assert f"# {names['ahead'].tolist()}\n" in blocks[0]
    mine = names["create_policy"]("emptiest_first").assign(names["view"])
    assert mine.instance.tolist() == [1, -1]


def test_the_simulation_page_migrates_a_request() -> None:
    (block,) = python_blocks("simulate.md")
    result = executed(block)["result"]
    assert (result.migrations, len(result.requests.number)) == (1, 40)


def test_the_page_on_plots_draws_what_it_says_and_saves_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("reference.md")
    names = executed(block)
    assert len(pyplot.get_fignums()) == 4
    assert [move.request for move in names["plan"].migrations] == [1]
    assert (tmp_path / "plan.svg").read_text().endswith("</svg>\n")
    pyplot.close("all")


def test_the_sample_trace_is_made_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    executed(python_blocks("advise.md")[0])
    assert (tmp_path / "examples/trace.csv").read_bytes() == Path(
        ROOT / "examples/trace.csv"
    ).read_bytes()


def test_spans_of_vllm_become_a_trace_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("vllm")
    tracer.start_span("tokenize", start_time=5).end()
    for arrival, prompt, answer in ((7_500_000_000, 12, 40), (6_000_000_000, 9, 1)):
        counts = {
            SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: prompt,
            SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: answer,
            SpanAttributes.GEN_AI_LATENCY_E2E: 0.5,
        }
        tracer.start_span("llm_request", start_time=arrival, attributes=counts).end()
    sent = encode_spans(exporter.get_finished_spans())  # as the file exporter writes it
    (tmp_path / "spans.jsonl").write_text(MessageToJson(sent, indent=None) + "\n")
    monkeypatch.chdir(tmp_path)
    executed(python_blocks("advise.md")[1])
    rows = (tmp_path / "traffic.csv").read_text().splitlines()
    assert rows == ["arrival_s,input_tokens,output_tokens", "0.000,9,1", "1.500,12,40"]
    assert TraceFile("traffic.csv").read_as


def test_the_gateway_page_shows_the_configuration_of_envoy() -> None:
    config = (DOCS / "envoy.yaml").read_text()
    assert f"```yaml\n{config}```" in (DOCS / "gateway.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "Makefile"], ids=page_name)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    for path in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w/.-]*\.\w+", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_dotted_name_exists(page: Path) -> None:
    packages = "benchmarks|data_collection|predictor|rescheduler"
    prose = re.sub(r"```python\n.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(rf"(?<![\w./-])(?:{packages})(?:\.\w+)+", prose):
        module, attributes = ROOT / name.replace(".", "/"), []
        while not (module.is_dir() or module.with_suffix(".py").is_file()):
            attributes.append(module.name)
            module = module.parent
        source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
        for attribute in attributes:
            found = re.search(rf"\b{attribute}\b", source.read_text())
            assert found, f"{page.name} names {name}"


def test_the_map_of_the_code_names_every_folder_of_it_and_no_other() -> None:
    page = (DOCS / "develop.md").read_text()
    named = set(re.findall(r"`([\w/]+)/`", page))
    missing = [folder for folder in named if not (ROOT / folder).is_dir()]
    assert not missing, f"develop.md names {missing}"
    for file in re.findall(r"`([\w]+/[\w/]+\.\w+)`", page):
        assert (ROOT / file).is_file(), f"develop.md names {file}"
    rooms = {
        str(init.parent.relative_to(ROOT))
        for package in ("data_collection", "predictor", "rescheduler")
        for init in (ROOT / package).glob("*/**/__init__.py")
    }
    assert rooms <= named, f"develop.md leaves out {sorted(rooms - named)}"


def test_the_migration_page_plans_as_it_says() -> None:
    (block,) = python_blocks("migrate.md")
    moves = [(m.request, m.source, m.target) for m in executed(block)["plan"].migrations]
    assert f"# {moves}\n" in block


SOURCES = [
    path
    for package in ("benchmarks", "data_collection", "deploy", "predictor", "rescheduler")
    for path in sorted((ROOT / package).rglob("*.py"))
]
COMMENTED = [
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "deploy").rglob("*.yml")),
    *sorted((ROOT / "charts").rglob("values*.yaml")),
]


def check_how(where: str, how: How) -> None:
    """Check that the test exists that is said to run a command, and that there is a reason."""
    if how.kind == "by":
        file, _, test = how.text.partition("::")
        assert (ROOT / file).is_file(), f"{where}: there is no {file}"
        assert re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), (
            f"{where}: {file} has no {test}"
        )
    if how.kind == "never":
        assert how.text, f"{where}: say why it cannot be run: 'never, REASON'"


SLOW = [ROOT / page for page in ("docs/order.md", "docs/see.md", "docs/train.md")]
"""Pages whose commands take seconds."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES],
    ids=page_name,
)
def test_the_commands_of_a_page(path: Path, tmp_path: Path) -> None:
    """What can run without engines does; the rest is parsed, and says who runs it."""
    page = read_page(path)
    with laid(tmp_path, page) as desk, ExitStack() as beside:
        for block in page.blocks:
            commands = block.commands
            for how in block.hows:
                check_how(block.where, how)
                if how.kind == "file":
                    desk.check_file(how)
            for command in commands:
                programs = desk.check(command)
                if command.how.kind == "check":
                    unknown = {words[0] for words in programs} & set(UNCHECKED)
                    assert not unknown, f"{block.where}: nobody here can parse {unknown}"
                if command.how.kind == "run":
                    desk.run(command, beside)
            if block.language in PYTHON and block.kind == "run":
                desk.run_python(block)


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_the_commands_within_the_lines_of_a_page(path: Path, tmp_path: Path) -> None:
    for span in spans_in(read_page(path).prose):
        for words in programs_of(span, tmp_path):
            check_mention(words)


def strings_of(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a program, with an X for what it fills in."""
    filled = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inner = {id(part) for node in filled for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value
    for node in filled:
        parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        yield "".join(map(str, parts))


COMMAND = re.compile(r"(?:^|: |\n *)(headway [a-z-]+[^\n`]*|python -m benchmarks\.[^\n`]*)")
INSTALL = re.compile(r"pip install (?:--[\w-]+ )*(?:'[^'\s]+'|[\w.-]+)")


def shown_by(path: Path) -> list[str]:
    """Return the commands in what a module prints and in its docstrings."""
    shown = []
    for text in strings_of(ast.parse(path.read_text())):
        shown += [*spans_in(text), *COMMAND.findall(text), *INSTALL.findall(text)]
    return shown


SHOWN = {path: shown for path in SOURCES if (shown := shown_by(path))}


@pytest.mark.parametrize("path", SHOWN, ids=page_name)
def test_the_commands_in_what_a_program_says(path: Path) -> None:
    """Messages, help texts and docstrings: verbs and options that there are."""
    for shown in SHOWN[path]:
        check_mention(shown.replace('"', "").replace("'", "").split())


@pytest.mark.parametrize("path", COMMENTED, ids=page_name)
def test_the_commands_in_the_text_of_a_file(path: Path, tmp_path: Path) -> None:
    """Configurations, rules of alerts and the values of the chart."""
    text = path.read_text()
    for shown in re.findall(r"^ *# +((?:headway|python -m) .*)$", text, re.MULTILINE):
        for words in programs_of(shown, tmp_path):
            check_words(words)
    for span in spans_in(text.replace("\n#", "\n")):
        for words in programs_of(span, tmp_path):
            check_mention(words)


@pytest.mark.parametrize(
    "command",
    [
        "headway servee --config FILE",
        "headway simulate --cluster.instnces 3",
        "headway launch --config configs/serve/none.yaml",
        "python -m benchmarks.planner --quickly",
        "pip install 'headway[gpus]'",
        "make tests",
    ],
)
def test_a_command_that_would_fail_is_found(command: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        for words in programs_of(command, tmp_path):
            check_words(words)


CARDS = sorted((ROOT / "checkpoints").glob("*/README.md"))


@pytest.mark.parametrize("path", CARDS, ids=page_name)
def test_what_a_card_shows(path: Path) -> None:
    text = path.read_text().replace("this folder", str(path.parent))
    for command in re.findall(r"^\| command \| (headway .*) \|$", text, re.MULTILINE):
        check_mention(command.split())
    for command in re.findall(r"^(headway .*)$", text, re.MULTILINE):
        check_words(shlex.split(command.replace("FILE.yaml", "configs/simulate/instant.yaml")))
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        numbers = torch.ones(1, 6 if "3 or 6" in block else 3)
        names = executed(block, hidden_states=torch.zeros(1, 576), numbers=numbers)
        assert 0 <= float(names["forecast"].at(80)[0]) <= 1


def test_what_the_card_of_a_dataset_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "dataset")
    monkeypatch.chdir(tmp_path / "dataset")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (block,) = python_blocks(tmp_path / "dataset" / "README.md")
    names = executed(block)
    assert len(names["requests"]) == 20 and len(names["rows"]) > 20


def test_the_usage_shows_commands_that_can_be_run() -> None:
    shown = re.findall(r"^  (headway .*)$", _USAGE, re.MULTILINE)
    assert len(shown) == 6
    for command in shown:
        check_words(command.split())


def test_the_makefile_says_what_its_targets_do() -> None:
    text = (ROOT / "Makefile").read_text()
    described = set(re.findall(r"^# make (\w+)", text, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert described == set(phony.split()) - {"install", "clean"}
