"""A batch through the real proxy, before scripted engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from coordinated_cluster import Coordinated
from scripted_cluster import cluster
from tokenizers import Tokenizer

from rescheduler.batch.batch import BatchSender, BatchStoppedError
from rescheduler.batch.batch_files import SERVED, BatchOutput, read_batch


async def sent(folder: Path, url: str, *lines: tuple[str, dict[str, Any]]) -> tuple[list[str], Any]:
    """Send a body to each endpoint; what has an answer, and the status of each error."""
    path = folder / "x.jsonl"
    asked = [
        {"custom_id": f"{i} {url}", "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(lines)
    ]
    path.write_text("\n".join(map(json.dumps, asked)))
    batch = read_batch(path)
    with BatchOutput(batch, folder / "x.results.jsonl") as output:
        assert await BatchSender(batch, output, url, 20.0).run(3)
    answered = [json.loads(line) for line in output.results.read_text().splitlines()]
    failed = [json.loads(line) for line in output.errors.read_text().splitlines()]
    errors = {one["custom_id"]: one["response"]["status_code"] for one in failed}
    return sorted(one["custom_id"] for one in answered), errors


async def test_every_endpoint_that_the_proxy_forwards_is_served(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    async with cluster(tokenizer) as it:
        answered, errors = await sent(
            tmp_path, it.url, *((url, body | {"max_tokens": 2}) for url in SERVED)
        )
    assert errors == {}
    assert answered == sorted(f"{i} {url}" for i, url in enumerate(SERVED))


async def test_the_proxy_says_how_large_a_line_may_be(tokenizer: Tokenizer, tmp_path: Path) -> None:
    small = {"model": "m", "prompt": "Hi", "max_tokens": 2}
    large = {"model": "m", "prompt": "x" * (9 << 20)}
    async with cluster(tokenizer, largest_body_mb=8) as it:
        lines = ("/v1/completions", large), ("/v1/completions", small)
        answered, errors = await sent(tmp_path, it.url, *lines)
    assert (answered, errors) == (["1 /v1/completions"], {"0 /v1/completions": 413})


async def test_behind_a_coordinator_the_tier_of_the_batch_is_no_error_of_its_requests(
    many: Coordinated, tmp_path: Path
) -> None:
    body = {"model": "m", "prompt": "Hi", "max_tokens": 2}
    with pytest.raises(BatchStoppedError) as raised:
        await sent(tmp_path, many.proxies[0].url, *[("/v1/completions", body)] * 3)
    assert "serves no background requests" in str(raised.value)
    assert 'give each body "service_tier": "default"' in str(raised.value)
    assert (tmp_path / "x.errors.jsonl").read_bytes() == b""
    lines = [("/v1/completions", body | {"service_tier": "default"})] * 3
    answered, errors = await sent(tmp_path, many.proxies[0].url, *lines)
    assert (len(answered), errors) == (3, {})
