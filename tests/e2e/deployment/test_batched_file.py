"""`headway batch` with real engines, beside online requests."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from proxying import served
from running_deployment import RunningDeployment

MESSAGES = [{"role": "user", "content": "Name a river."}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "One two three", "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30}),
    ("/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 5}),
    ("/v1/completions", {"prompt": "One", "max_tokens": 5, "temperature": -3}),
]
ERRORS = (3,)


async def test_a_batch_is_answered_beside_online_requests(
    deployment: RunningDeployment, headway_command: list[str], tmp_path: Path
) -> None:
    asked = tmp_path / "asked.jsonl"
    lines = []
    for number in range(24):
        url, body = BODIES[number % len(BODIES)]
        body = {"model": "smollm2", "temperature": 0, "seed": number} | body
        line = {"custom_id": f"q-{number}", "method": "POST", "url": url, "body": body}
        lines.append(json.dumps(line))
    asked.write_text("\n".join(lines))
    with served(deployment, tmp_path) as proxy:
        async with proxy.client() as client:
            command = [*headway_command, "batch", str(asked), "--url", client.proxy]
            running = asyncio.create_task(
                asyncio.to_thread(
                    subprocess.run, command, capture_output=True, text=True, check=False
                )
            )
            online = [await client.post({"prompt": "Hello", "max_tokens": 20}) for _ in range(6)]
            done = await running
            alone = [
                (await client.post({**body, "temperature": 0}, path=url))[1]
                for url, body in BODIES[:2]
            ]
            assert all(status == 200 for status, *_ in online)
    assert done.returncode == 3, done.stdout + done.stderr
    results = (tmp_path / "asked.results.jsonl").read_text().splitlines()
    errors = (tmp_path / "asked.errors.jsonl").read_text().splitlines()
    answers = {one["custom_id"]: one["response"] for one in map(json.loads, results)}
    refused = {one["custom_id"]: one["response"] for one in map(json.loads, errors)}
    assert set(refused) == {f"q-{n}" for n in range(24) if n % len(BODIES) in ERRORS}
    assert {one["status_code"] for one in refused.values()} == {400}
    assert len(answers) == len(results) == 18
    for number in range(24):
        kind = number % len(BODIES)
        if kind < 2:
            choices = answers[f"q-{number}"]["body"]["choices"]
            assert [said(one) for one in choices] == [said(one) for one in alone[kind]["choices"]]


def said(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text
