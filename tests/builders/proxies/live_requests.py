"""Requests and instances as a proxy knows them, without engines."""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rescheduler.engines.deployment import Instance
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements

TOKENIZER = Tokenizer(WordLevel({"a": 0}, unk_token="a"))


def instance_state(
    name: str, role: Any = "decode", options: ProxyOptions | None = None, control: Any = None
) -> InstanceState:
    instance = Instance(name, role, f"http://{name}:1")
    return InstanceState(instance, options or ProxyOptions(), control)


def live_request(
    name: str, placements: Placements[LiveRequest] | None = None, arrived: float = 0.0, **body: Any
) -> LiveRequest:
    client = read_request(COMPLETIONS, json.dumps({"prompt": "a", **body}).encode())
    on = placements if placements is not None else Placements[LiveRequest]()
    return LiveRequest(name, name, client, {}, arrived, TOKENIZER, on)
