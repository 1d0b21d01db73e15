"""The demonstration's screen, and its lines without a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rescheduler.demo.demo_load import ServedRequest
from rescheduler.demo.demo_phase import Move, Phase

__all__ = ["move_line", "screen", "stream_text", "summary_line"]

_BAR = 32
_SHOWN_MOVES = 6
_TEXT_LINES = 8


def screen(phase: Phase, width: int = 100) -> RenderableType:
    """Return the whole screen of a phase as it is now.

    Args:
        phase: what is seen of it.
        width: columns of the terminal.
    """
    done = sum(bool(served.finish_reason or served.error) for served in phase.served)
    head = Text(phase.title, style="bold")
    head.append(f"   {phase.run.seconds:.0f} s", style="not bold")
    head.append(f"   {done} of {len(phase.load)} requests answered", style="not bold")
    head.append(f"   {phase.preempted} preempted", style="red" if phase.preempted else "not bold")
    parts: list[RenderableType] = [head, Text(), _instances(phase), Text()]
    parts.append(Text("migrations", style="bold"))
    shown = [move_line(phase, move) for move in phase.moves[-_SHOWN_MOVES:]]
    parts += [Text(line) for line in shown or ["none"]]
    client = shown_client(phase)
    if client is not None:
        text = stream_text(client, phase.moves)
        keep = _TEXT_LINES * max(20, width - 2)
        parts += [Text(), Text(f"what the client of {client.request.name} reads", style="bold")]
        parts.append(text[-keep:])
    return Group(*parts)


def summary_line(phase: Phase) -> str:
    """Return one line that says the same in short."""
    done = sum(bool(served.finish_reason or served.error) for served in phase.served)
    engines = "; ".join(
        f"{name}: KV {_usage(state.num_blocks, state.free_blocks):.0%}, "
        f"{state.running} running, {state.waiting} waiting"
        for name, state in phase.states.items()
    )
    return (
        f"{phase.run.seconds:4.0f} s  {engines}; {done} of {len(phase.load)} "
        f"answered, {phase.preempted} preempted, {len(phase.moves)} moved"
    )


def move_line(phase: Phase, move: Move) -> str:
    """Return a migration as a line."""
    served = phase.run.served.get(move.request)
    pause = served.gap_after(move.tokens) if served else None
    paused = "" if pause is None else f", paused {1e3 * pause:.0f} ms"
    return (
        f"{move.time - phase.run.started:5.1f} s  {move.request}  {move.source} → {move.target}"
        f"  after {move.tokens} tokens{paused}"
    )


def shown_client(phase: Phase) -> ServedRequest | None:
    """Return the client whose text is shown: the one that moved last, before that the first."""
    for move in reversed(phase.moves):
        if move.request in phase.run.served:
            return phase.run.served[move.request]
    return phase.served[0] if phase.served else None


def stream_text(served: ServedRequest, moves: Sequence[Move]) -> Text:
    """Return the text of an answer, with a mark wherever it moved, which no line end can tear."""
    mine = [move for move in moves if move.request == served.request.name]
    text = Text()
    for piece in served.chunks:
        while mine and piece.tokens > mine[0].tokens:
            move = mine.pop(0)
            text.append(f" ⟪{move.source}→{move.target}⟫ ", style="bold reverse")
        text.append(piece.text.replace("\n", " "))
    return text


def _instances(phase: Phase) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("decode instance", no_wrap=True)
    table.add_column("KV cache", width=_BAR, no_wrap=True)
    for name in ("tokens", "running", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, state in phase.states.items():
        share = _usage(state.num_blocks, state.free_blocks)
        used = (state.num_blocks - state.free_blocks) * state.block_size
        style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
        bar = Text("━" * round(share * _BAR), style=style)
        bar.append("━" * (_BAR - len(bar)), style="dim")
        tokens = f"{used:,} of {state.num_blocks * state.block_size:,}"
        table.add_row(name, bar, tokens, str(state.running), str(state.waiting))
    return table


def _usage(blocks: int, free: int) -> float:
    return (blocks - free) / max(1, blocks)
