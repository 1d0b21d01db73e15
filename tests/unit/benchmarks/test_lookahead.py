"""What `benchmarks.lookahead` goes on from."""

from pathlib import Path

import pytest

from benchmarks.lookahead import kept_in
from benchmarks.support.report import write_report


@pytest.mark.parametrize("quick", [False, True])
def test_a_short_runs_tables_do_not_pass_for_those_of_a_full_run(
    tmp_path: Path, quick: bool
) -> None:
    file, figures, tables = tmp_path / "report.json", {"ratio": 0.5}, {"Table 1, oracle": "| |"}
    assert kept_in(None, quick) == kept_in(file, quick) == ({}, {})
    write_report("lookahead", figures, file, quiet=True, tables=tables, quick=quick)
    assert kept_in(file, quick) == (figures, tables)
    assert kept_in(file, not quick) == ({}, {})


def test_the_shipped_report_is_of_a_full_run() -> None:
    report = Path(__file__).parents[3] / "benchmarks" / "results" / "lookahead.json"
    assert "Table 1, oracle" in kept_in(report, quick=False)[1]
