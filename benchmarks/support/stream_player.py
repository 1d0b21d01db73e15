"""An upstream that plays streams as vLLM writes them, at a steady pace.

It costs the same each time, unlike an engine, so that what a benchmark measures is what lies
between it and the client. Each chunk says in its text when it was written.
"""

import argparse
import asyncio
import json
import time
from contextlib import suppress

from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-seconds", type=float, default=0.02)
    options = parser.parse_args()
    asyncio.run(_serve(options.token_seconds))


async def _serve(token_seconds: float) -> None:
    async def health(http: web.Request) -> web.Response:
        return web.Response()

    async def complete(http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            handed = {"do_remote_prefill": True, "do_remote_decode": False}
            usage = {"prompt_tokens": 16, "completion_tokens": 1, "total_tokens": 17}
            return web.json_response(
                {"id": "cmpl-0", "choices": [], "usage": usage, "kv_transfer_params": handed}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        pace = token_seconds if body.get("temperature") != 0 else 0.0  # 0: as fast as it goes
        tokens = body["max_tokens"]
        with suppress(ConnectionResetError):  # its client has left
            for i in range(tokens):
                if pace and i:
                    await asyncio.sleep(pace)
                await response.write(_chunk(i, i + 1 == tokens))
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def _chunk(i: int, last: bool) -> bytes:
    choice = {
        "index": 0,
        "text": f"{time.monotonic():.6f} ",
        "logprobs": None,
        "finish_reason": "length" if last else None,
        "stop_reason": None,
        "prompt_token_ids": list(range(16)) if i == 0 else None,
        "token_ids": [1000 + i],
    }
    chunk = {
        "id": "cmpl-8f9bfc3d32da4a84ae59697e0dc4f41e",
        "object": "text_completion",
        "created": 1795293437,
        "model": "smollm2",
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


if __name__ == "__main__":
    main()
