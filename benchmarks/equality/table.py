"""The differences as the documentation shows them."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.equality.comparing import Difference
from benchmarks.equality.reasons import REASONS
from data_collection.atomic_file import write_text_atomically

_BEGIN, _END = "<!-- equality: begin -->\n", "<!-- equality: end -->\n"


def table(cases: int, differences: Sequence[Difference]) -> str:
    """Return differences as Markdown: each reason, and the requests that it explains."""
    order = [*REASONS, ""]
    alike = cases - len(differences)
    lines = [
        f"Of {cases} requests, {alike} were answered alike. The other {len(differences)}:",
        "",
        "| request | vLLM | proxy | differs |",
        "|---|---:|---:|---|",
    ]
    ranked = sorted(differences, key=lambda one: order.index(one.reason))  # stable
    for reason, ones in groupby(ranked, key=lambda one: one.reason):
        lines.append(f"| **{reason or 'unexplained'}** | | | |")
        for one in ones:
            differs = ", ".join(one.fields) or "status"
            lines.append(f"| {_escaped(one.request)} | {one.vllm} | {one.proxy} | {differs} |")
    return "\n".join(lines) + "\n"


def write_table(page: Path, text: str) -> None:
    """Write a table between the comments of a page that mark its place."""
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page}: has no lines {_BEGIN.strip()} and {_END.strip()}")
    write_text_atomically(page, before + begin + text + end + after)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
