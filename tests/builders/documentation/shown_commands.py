"""The commands that pages show, and how each of them is tested.

A comment above a block of code says it, ``<!-- test: HOW -->``, once for all of the block's
commands or a line for each; docs/develop.md has the words.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "transcripts").rglob("README.md")),
    *sorted((ROOT / "recordings").rglob("README.md")),
]

SHELL = ("", "bash", "sh", "console", "shell")
PYTHON = ("python", "py")
RUN = ("run", "engines", "nightly")
"""What is run by the tests of all pages."""
UNTESTED = ("mermaid",)
"""Languages of blocks that hold nothing to test."""

KINDS = {
    "run": "run without engines, by `make test`",
    "engines": "run with real engines, by `make test`",
    "by": "run by a test of its own",
    "nightly": "run by `make nightly`",
    "check": "parsed only",
    "never": "cannot run here",
    "file": "a file that commands read",
    "added": "a part of such a file",
    "output": "no command",
}
_TOOLS = (
    r"headway|make|pip|python|curl|docker|helm|kind|kubectl|ray|jupyter|envoy|openssl|prometheus"
    r"|promtool|ssh|vllm|source"
)
_SPAN = re.compile(rf"^(?:[A-Z_]+=\S+ )*(?:{_TOOLS}) (?!.*: )(?:-[\w-]|[\w./'\"{{]|…)|^python -m ")


@dataclass(frozen=True)
class How:
    """How a command, or a block, is tested: a word of docs/develop.md, and what follows it."""

    kind: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A command that a page shows."""

    text: str
    how: How

    @property
    def words(self) -> list[str]:
        """Its words, as a shell gives them to a program, without comments."""
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``hows`` are its commands', in their order, or one for all."""

    where: str
    language: str
    text: str
    hows: tuple[How, ...]

    @property
    def kind(self) -> str:
        """What it is said to be, where its commands do not differ."""
        return self.hows[0].kind if self.hows else ""

    @cached_property
    def commands(self) -> list[Shown]:
        """The commands in it, each with the way in which it is tested."""
        if self.language in UNTESTED:
            return []
        assert self.hows, f"{self.where}: say how it is tested (docs/develop.md)"
        if self.language not in SHELL or self.kind in ("output", "file", "added"):
            return []
        texts = list(_commands_in(self.text))
        hows = self.hows * len(texts) if len(self.hows) == 1 else self.hows
        assert len(hows) == len(texts) > 0, (
            f"{self.where}: says of {len(self.hows)} commands how they are tested, and has "
            f"{len(texts)}"
        )
        return [Shown(text, how) for text, how in zip(texts, hows, strict=True)]


@dataclass
class Page:
    """A page, and what stands for the files that its commands name."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    stand_ins: dict[str, str] = field(default_factory=dict)
    prose: str = ""

    def shown(self, *kinds: str) -> list[Shown]:
        """Return the commands that are tested in one of these ways."""
        commands = [command for block in self.blocks for command in block.commands]
        return [command for command in commands if command.how.kind in kinds]


def read_page(path: Path) -> Page:
    """Return a page's blocks and what it says of their tests."""
    page = Page(str(path.relative_to(ROOT)))
    pattern = re.compile(
        r"^ *<!-- test:(?P<said>.*?)-->\n|^ *```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^ *```$",
        re.DOTALL | re.MULTILINE,
    )
    text, end = path.read_text(), 0
    hows: tuple[How, ...] = ()
    for found in pattern.finditer(text):
        between, end = text[end : found.start()], found.end()
        page.prose += between
        if found["said"] is None:
            where = f"{page.name}, block {len(page.blocks) + 1}"
            if between.strip():
                hows = ()
            page.blocks.append(Block(where, found["language"], found["text"], hows))
            hows = ()
        else:
            assert not hows, f"{page.name}: two comments say how one block is tested"
            hows = tuple(_understood(found["said"], page))
    page.prose += text[end:]
    return page


def _understood(said: str, page: Page) -> Iterator[How]:
    for part in re.split(r"[;\n]", said):
        words = " ".join(part.split())
        stands = re.fullmatch(r"(\S+) is (an? .+|the .+)", words)
        if stands:
            page.stand_ins[stands[1]] = stands[2]
        elif words:
            kind, _, text = words.replace("never:", "never", 1).partition(" ")
            assert kind in KINDS, f"{page.name}: {words!r}: no test of that kind"
            yield How(kind, text)


def _commands_in(text: str) -> Iterator[str]:
    """Yield the commands of a block; where some lines begin with ``$``, these are."""
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        yield from (line[2:] for line in lines if line.startswith("$ "))
        return
    command = ""
    for line in lines:
        command += line + "\n"
        if not _is_open(command):
            if shlex.split(command, comments=True):
                yield command.strip()
            command = ""
    assert not command, f"this command has no end:\n{command}"


def _is_open(command: str) -> bool:
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return True  # inside quotes
    if command.rstrip().endswith("\\"):
        return True
    return words[:1] == ["for"] and words[-1:] != ["done"]


def spans_in(text: str) -> Iterator[str]:
    """Yield the commands that a text has within its lines, between backquotes."""
    for span in re.findall(r"(?<!`)`{1,2}([^`]+)`{1,2}(?!`)", text):
        words = " ".join(span.split())
        if _SPAN.search(words):
            yield words
