"""What a planner did, from the proxy's log and from when every token came.

For every move: when it was planned and how long it took, from where to where, the request's
context, the gain that the planner predicted, and whether its source would have overflowed had it
stayed, now that all lengths are known.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

_STAMP = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) "
_PLACED = re.compile(_STAMP + r"request (\w+) \((.+)\), (\d+) tokens: to (\S+)$")
_MOVED = re.compile(
    _STAMP + r"request (\w+), (\d+) tokens: (\S+) to (\S+): (\w+) after ([\d.]+) s "
    r"\((\S+), gain ([\d.e+-]+)\)$"
)


def read_placements(log: Path, started: float) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the names of the proxy's requests by id, and where it placed each."""
    names: dict[str, str] = {}
    placements = []
    for line in log.read_text(errors="replace").splitlines():
        if found := _PLACED.match(line):
            stamp, id, name, tokens, target = found.groups()
            names[id] = name
            placements.append(
                {
                    "seconds": _seconds(stamp, started),
                    "request": name,
                    "tokens": int(tokens),
                    "target": target,
                }
            )
    return names, placements


def read_moves(log: Path, started: float, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return all moves that a planner began, in the order in which they ended."""
    moves = []
    for line in log.read_text(errors="replace").splitlines():
        if found := _MOVED.match(line):
            stamp, id, tokens, source, target, outcome, took, planner, gain = found.groups()
            moves.append(
                {
                    "seconds": _seconds(stamp, started) - float(took),
                    "took": float(took),
                    "request": names.get(id, id),
                    "tokens": int(tokens),
                    "source": source,
                    "target": target,
                    "outcome": outcome,
                    "planner": planner,
                    "gain": float(gain),
                }
            )
    return moves


def with_overflows(
    moves: Sequence[Mapping[str, Any]],
    placements: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    capacity: int,
) -> list[dict[str, Any]]:
    """Return the moves with what would have come of them.

    ``source_overflows``: steps until the source's KV cache, of ``capacity`` tokens, would have
    overflowed had the request stayed and nobody come; None if it would not have.
    ``target_overflows``: the same of the target once it has the request.
    """
    known = {one["name"]: one for one in requests}
    changes = [(one["seconds"], one["request"], one["target"]) for one in placements]
    changes += [
        (one["seconds"] + one["took"], one["request"], one["target"])
        for one in moves
        if one["outcome"] == "moved"
    ]
    changes.sort()
    found = []
    for move in moves:
        where: dict[str, str] = {}
        for seconds, name, instance in changes:
            if seconds < move["seconds"]:
                where[name] = instance
        now = move["seconds"]
        loads: dict[str, list[tuple[int, int]]] = {move["source"]: [], move["target"]: []}
        own = None
        for name, instance in where.items():
            one = known.get(name)
            if one is None or one["ended"] <= now or instance not in loads:
                continue
            generated = _tokens_by(one["times"], now)
            pair = (one["prompt"] + generated, max(one["tokens"] - generated, 0))
            loads[instance].append(pair)
            if name == move["request"]:
                own = pair
        there = loads[move["target"]] + ([own] if own is not None else [])
        found.append(
            {
                **move,
                "left": None if own is None else own[1],
                "source_overflows": overflows_after(loads[move["source"]], capacity),
                "target_overflows": overflows_after(there, capacity),
            }
        )
    return found


def overflows_after(requests: Sequence[tuple[int, int]], capacity: int) -> int | None:
    """Return the steps until requests no longer fit together, or None if they always do."""
    if not requests:
        return None
    context, left = np.array(requests).T
    steps = np.arange(left.max() + 1)[:, None]
    load = np.where(steps < left, context + steps, 0).sum(axis=1)
    over = np.flatnonzero(load > capacity)
    return int(over[0]) if len(over) else None


def _tokens_by(times: Sequence[Sequence[float]], seconds: float) -> int:
    tokens = [int(n) for n, at in times if at <= seconds]
    return tokens[-1] if tokens else 0


def _seconds(stamp: str, started: float) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f").timestamp() - started
