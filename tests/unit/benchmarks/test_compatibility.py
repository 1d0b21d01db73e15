"""How the parts of a version fared, and what has changed of the symbols that are touched."""

from pathlib import Path

import pytest

from benchmarks.compatibility import PARTS, outcomes_of
from benchmarks.support.report import with_tables
from benchmarks.vllm_symbols import source_of

CONTRACT = "tests.integration.test_vllm_contract"
VERSIONS = "tests.versions.test_parts_of_a_version"


def report(folder: Path, *cases: tuple[str, str, str]) -> Path:
    path = folder / "report.xml"
    inner = "".join(
        f'<testcase classname="{kind}" name="{name}">{how}</testcase>' for kind, name, how in cases
    )
    path.write_text(f"<testsuites><testsuite>{inner}</testsuite></testsuites>")
    return path


def test_each_part_fares_as_its_own_tests(tmp_path: Path) -> None:
    found = outcomes_of(
        report(
            tmp_path,
            (CONTRACT, "test_moves_of_names", ""),
            (VERSIONS, "test_the_version_is_the_one_that_was_asked_for", ""),
            (VERSIONS, "test_capture", ""),
            (VERSIONS, "test_forecasts", "<error/>"),
            (VERSIONS, "test_moves[greedy]", ""),
            (VERSIONS, "test_moves[seed]", "<failure/>"),
        ),
        "",
    )
    assert found == dict(
        zip(PARTS, ["passed", "passed", "failed", "passed", "failed"], strict=True)
    )


def test_another_version_than_asked_for_fails_all_parts(tmp_path: Path) -> None:
    found = outcomes_of(report(tmp_path, (VERSIONS, "test_the_version_is_x", "<failure/>")), "")
    assert found == {"contract": "not run"} | dict.fromkeys(PARTS[1:], "failed")


def test_only_the_tables_of_a_page_are_replaced() -> None:
    page = "# A\n<!-- a: begin -->\nold\n<!-- a: end -->\nrest <!-- b: begin --><!-- b: end -->"
    once = with_tables(page, {"a": "| new |", "b": "| b |"})
    assert once == with_tables(once, {"a": "| new |", "b": "| b |"})
    assert "old" not in once
    assert once.startswith("# A\n<!-- a: begin -->\n| new |\n<!-- a: end -->\nrest ")
    with pytest.raises(ValueError, match="no <!-- c: begin -->"):
        with_tables(page, {"c": ""})


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('def f(a):\n    """One."""\n    return a  # so', "def f(a):\n\n    return a", True),
        ("def f(a):\n    return a", "def f(a, b):\n    return a", False),
        ("class A:\n    x: int", "class A:\n    x: int\n    y: int", False),
        ("def f(): pass", "def g(): pass", False),
    ],
)
def test_only_what_python_sees_of_a_symbol_counts(
    tmp_path: Path, before: str, after: str, same: bool
) -> None:
    name = "A" if before.startswith("class") else "f"
    for folder, text in (("old", before), ("new", after)):
        (tmp_path / folder / "v1").mkdir(parents=True)
        (tmp_path / folder / "v1" / "request.py").write_text(text)
    old, new = (source_of(tmp_path / folder, "v1.request", name) for folder in ("old", "new"))
    assert (old == new) == same
    assert old
    assert source_of(tmp_path / "old", "v1.nothing", name) == []
