"""Every command that pages and programs show: what can be run at once is, the rest is parsed."""

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_commands import UNCHECKED, check_mention, check_words, programs_of
from desk import laid
from recorded_dataset import record
from shown_commands import PAGES, PYTHON, ROOT, How, read_page, spans_in

from rescheduler.commands.command_line import _USAGE

SOURCES = [
    path
    for package in ("benchmarks", "data_collection", "deploy", "predictor", "rescheduler")
    for path in sorted((ROOT / package).rglob("*.py"))
]
COMMENTED = [
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "deploy").rglob("*.yml")),
    *sorted((ROOT / "charts").rglob("values.yaml")),
]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


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
def test_the_commands_within_the_lines_of_a_page(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
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
def test_the_commands_in_what_a_program_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, help texts and docstrings: verbs and options that there are."""
    monkeypatch.chdir(ROOT)
    for shown in SHOWN[path]:
        check_mention(shown.replace('"', "").replace("'", "").split())


@pytest.mark.parametrize("path", COMMENTED, ids=page_name)
def test_the_commands_in_the_text_of_a_file(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations, rules of alerts and the values of the chart."""
    monkeypatch.chdir(ROOT)
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
def test_a_command_that_would_fail_is_found(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(AssertionError):
        for words in programs_of(command, tmp_path):
            check_words(words)


CARDS = sorted((ROOT / "checkpoints").glob("*/README.md"))


@pytest.mark.parametrize("path", CARDS, ids=page_name)
def test_what_a_card_shows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text().replace("this folder", str(path.parent))
    for command in re.findall(r"^\| command \| (headway .*) \|$", text, re.MULTILINE):
        check_mention(command.split())
    for command in re.findall(r"^(headway .*)$", text, re.MULTILINE):
        check_words(shlex.split(command.replace("FILE.yaml", "configs/simulate/instant.yaml")))
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        columns = 6 if "3 or 6" in block else 3
        names = {"hidden_states": torch.zeros(1, 576), "numbers": torch.ones(1, columns)}
        exec(block, names)
        assert 0 <= float(names["forecast"].at(80)[0]) <= 1


def test_what_the_card_of_a_dataset_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "dataset")
    monkeypatch.chdir(tmp_path / "dataset")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (block,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert len(names["requests"]) == 20 and len(names["rows"]) > 20


def test_the_usage_shows_commands_that_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"^  (headway .*)$", _USAGE, re.MULTILINE)
    assert len(shown) == 6
    for command in shown:
        check_words(command.split())


def test_the_makefile_says_what_its_targets_do() -> None:
    text = (ROOT / "Makefile").read_text()
    described = set(re.findall(r"^# make (\w+)", text, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert described == set(phony.split()) - {"install", "clean"}
