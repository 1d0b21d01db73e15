"""Fails on long sentences and on listed phrases in pages and help texts: part of `make lint`.

    python -m deploy.language [--update] [--show FILE]

A sentence has at most 30 words; a cell of a table counts as one. What files still have of either
is in `deploy/language.json`, and may only fall: a page that has more fails, and one that has fewer
fails until --update writes the smaller number.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rescheduler.commands.verbs import VERBS

_ROOT = Path(__file__).parents[1]
_ALLOWED = Path(__file__).with_suffix(".json")
_MOST_WORDS = 30
_PAGES = ("*.md", "docs/**/*.md", "recordings/*.md", "transcripts/**/*.md")
_OPTIONS = (
    "data_collection/workload/arrivals.py",
    "data_collection/workload/engine_options.py",
    "rescheduler/engines/deployment.py",
    "rescheduler/engines/proxy_options.py",
    "rescheduler/simulator/config/simulation_config.py",
)
"""Modules whose classes hold options: the help and the chart's schema show their docstrings."""

_PHRASES = re.compile(
    r", so that\b|\bin place of\b|\bby itself\b|\bthose of\b|\bthat of\b|\bof which\b"
    r"|[,;] else\b|\bso long\b|\blikewise\b|\bit is what\b",
    re.IGNORECASE,
)
_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\bal\.)[\"')*]*\s+(?=[\"'(*`\[]*[A-Z0-9`])")
_ITEM = re.compile(r"^ *(?:[-*>]|\d+\.) +", re.MULTILINE)


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page in Markdown, without code, and the cells of its tables."""
    page = re.sub(r"<!--.*?-->|^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"`{1,2}[^`]+`{1,2}", "`code`", page)
    page = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\1\n\n", page)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^(#+ .*)$", r"\1\n", page, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*>] |\d+\. |#|\|))", page):
        if block.lstrip().startswith("|"):
            yield from (cell.strip() for cell in block.split("|"))
        else:
            yield from _END.split(" ".join(_ITEM.sub("", block).split()))


def described(path: Path, names: set[str]) -> Iterator[str]:
    """Yield the sentences of the docstrings of functions of these names, or of all classes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if node.name in names or (isinstance(node, ast.ClassDef) and not names):
            text = (ast.get_docstring(node) or "").partition("\nRaises:")[0]
            yield from sentences(re.sub(r"\n +(\w+): ", r"\n\n", text))


def faults_of(said: Iterator[str]) -> list[str]:
    """Return a line for each long sentence, and one for each listed phrase."""
    lines = []
    for sentence in said:
        words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
        if words > _MOST_WORDS:
            lines.append(f"{words} words: {sentence}")
        lines += [f"{phrase.strip(' ,;')}: {sentence}" for phrase in _PHRASES.findall(sentence)]
    return lines


def found() -> dict[str, list[str]]:
    """Return the faults of each file that has any."""
    pages = {path for pattern in _PAGES for path in _ROOT.glob(pattern)}
    faults = {path: faults_of(sentences(path.read_text())) for path in pages}
    for verb in filter(None, (verb.function for verb in VERBS.values())):
        module, _, function = verb.partition(":")
        path = _ROOT / f"{module.replace('.', '/')}.py"
        faults[path] = faults_of(described(path, {function}))
    for name in _OPTIONS:
        faults[_ROOT / name] = faults_of(described(_ROOT / name, set()))
    texts = iter(verb.text for verb in VERBS.values())
    faults[_ROOT / "rescheduler/commands/verbs.py"] = faults_of(texts)
    return {str(path.relative_to(_ROOT)): lines for path, lines in sorted(faults.items()) if lines}


def main() -> int:
    """Compare with what is allowed; return the exit status."""
    parser = argparse.ArgumentParser(description="long sentences and listed phrases")
    parser.add_argument("--update", action="store_true", help="write smaller numbers")
    parser.add_argument("--show", metavar="FILE", help="print the faults of one file")
    options = parser.parse_args()
    faults = found()
    if options.show:
        print(*faults.get(options.show, []), sep="\n")
        return 0
    allowed: dict[str, int] = json.loads(_ALLOWED.read_text())
    counts = {file: len(lines) for file, lines in faults.items()}
    if options.update:
        kept = {file: min(counts[file], most) for file, most in allowed.items() if file in counts}
        _ALLOWED.write_text(json.dumps(kept, indent=2) + "\n")
        return 0
    wrong = sorted(file for file in {*counts, *allowed} if counts.get(file) != allowed.get(file))
    for file in wrong:
        count, most = counts.get(file, 0), allowed.get(file, 0)
        print(f"{file}: {count} faults of language, {most} allowed", file=sys.stderr)
        remedy = f"--show {file}" if count > most else "--update"
        print(f"  python -m deploy.language {remedy}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
