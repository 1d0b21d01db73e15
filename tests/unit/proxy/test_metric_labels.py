"""Labels of metrics: whoever asks, answers or reports, there are only so many series."""

import re

from scripted_cluster import PROMPT, cluster
from tokenizers import Tokenizer


def label_values(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, value in re.findall(r'(\w+)="([^"]*)"', text):
        found.setdefault(name, set()).add(value)
    return found


async def test_no_client_adds_a_series(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:

        async def ask(number: int) -> None:
            body = {"model": f"m{number}", "prompt": PROMPT, "user": f"u{number}", "max_tokens": 2}
            headers = {"X-Request-Id": f"name-{number}", "Authorization": f"Bearer {number}"}
            paths = ("completions", "chat/completions", "embeddings", f"x{number}", "%63ompletions")
            for path in paths:
                url = f"{it.url}/v1/{path}?number={number}"
                async with it.session.post(url, json=body, headers=headers) as response:
                    await response.read()

        await ask(0)
        before = label_values(await it.text("/metrics"))
        for number in range(1, 10):
            await ask(number)
        assert label_values(await it.text("/metrics")) == before
        assert before["instance_name"] == set(it.engines)
        paths = {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
        assert before["path"] <= paths
