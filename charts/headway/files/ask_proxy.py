"""Asks a proxy for its health, its models and one completion: `helm test` runs it in a pod."""

import json
import os
import sys
import time
from urllib.request import Request, urlopen

URL, MODEL = sys.argv[1:]
KEY = os.environ.get("VLLM_API_KEY")
HEADERS = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if KEY else {})


def ask(path: str, body: bytes | None = None) -> bytes:
    """Return what the proxy answers to a GET, or to a POST if there is a body."""
    return bytes(urlopen(Request(URL + path, body, HEADERS)).read())


for left in reversed(range(15)):  # until the network lets this pod through
    try:
        ask("/health")
        break
    except OSError as error:
        if not left:
            sys.exit(f"{URL}/health: {error}")
        time.sleep(2)
models = [model["id"] for model in json.loads(ask("/v1/models"))["data"]]
if MODEL not in models:
    sys.exit(f"{URL}/v1/models: {models}, without {MODEL}")
asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
answer = json.loads(ask("/v1/completions", json.dumps(asked).encode()))
print(f"{URL} serves {MODEL}: {answer['choices'][0]['text']!r}")
