"""Choose the prompts of the shipped checkpoint's dataset, and how each is sampled.

    python -m benchmarks.shipped_prompts PROMPTS.jsonl.gz MULTITURN.jsonl.gz --out runs/prompts

Writes ``round-1.jsonl``, ``round-2.jsonl``, ... for training and validation, which ask the same
prompts with other settings; ``held-out.jsonl``, prompts of the same tasks that no round asks; and
``new-tasks.jsonl``, whole tasks that no round asks. `headway collect` takes each of them. The same
input gives the same files.
"""

import argparse
import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

_LICENCES = {"Apache-2.0", "MIT", "CC0-1.0", "CC-BY-4.0"}
_NEW_TASKS = {"rewrite", "story", "chat_math", "translate", "classify"}
_HELD_OUT = 0.15
_TEMPERATURES = {0.0: 4, 0.2: 6, 0.4: 10, 0.6: 20, 0.8: 35, 1.0: 25}
_MAX_TOKENS = {256: 4, 512: 8, 1024: 23, 2048: 65}
_SYSTEM_SHARE = 0.15
_SYSTEM = (
    "You are a helpful assistant. Answer briefly.",
    "Answer in one sentence.",
    "You are a patient teacher. Explain every step.",
    "You are an expert programmer. Reply with code and short comments.",
    "Be thorough: give examples and mention exceptions.",
    "Reply in a friendly tone, in at most three paragraphs.",
    "You are a careful editor. Return only the text that was asked for.",
    "Think step by step, then state the final answer on its own line.",
    "You write for a general audience. Avoid jargon.",
    "Use bullet points wherever you can.",
)


def main() -> None:
    """Write the files of prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="+", help="JSON Lines, gzipped")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--rounds", type=int, default=3, help="answers to each training prompt")
    options = parser.parse_args()
    records = [record for path in options.prompts for record in _read(path)]
    new_tasks = [record for record in records if record["task"] in _NEW_TASKS]
    others = [record for record in records if record["task"] not in _NEW_TASKS]
    held_out = [record for record in others if _share(record["id"]) < _HELD_OUT]
    asked = [record for record in others if _share(record["id"]) >= _HELD_OUT]
    options.out.mkdir(parents=True, exist_ok=True)
    files = {f"round-{i + 1}": asked for i in range(options.rounds)}
    files |= {"held-out": held_out, "new-tasks": new_tasks}
    for name, chosen in files.items():
        generator = random.Random(name)
        lines = [json.dumps(_with_settings(record, generator)) for record in chosen]
        generator.shuffle(lines)
        (options.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{options.out / name}.jsonl: {len(lines)} prompts")


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the prompts whose licence permits to ship their text."""
    records = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            messages = record.get("messages") or (
                [{"role": "user", "content": record["prompt"]}] if "prompt" in record else None
            )
            if messages and record["licence"] in _LICENCES:
                records.append(
                    {
                        "id": record["id"],
                        "source": f"{record['source']} ({record['licence']})",
                        "task": record.get("task", "multi-turn"),
                        "messages": messages,
                    }
                )
    return records


def _share(name: str) -> float:
    """Return where a prompt stands in [0, 1), by its id alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64


def _with_settings(record: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    messages = list(record["messages"])
    if generator.random() < _SYSTEM_SHARE and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": generator.choice(_SYSTEM)})
    (temperature,) = generator.choices(list(_TEMPERATURES), list(_TEMPERATURES.values()))
    (max_tokens,) = generator.choices(list(_MAX_TOKENS), list(_MAX_TOKENS.values()))
    return record | {
        "messages": messages,
        "temperature": temperature,
        "max_tokens": max_tokens,
    }


if __name__ == "__main__":
    main()
