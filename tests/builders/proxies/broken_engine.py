"""A scripted engine that answers whatever a test has it answer."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from scripted_engine import ScriptedEngine

Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class BrokenEngine(ScriptedEngine):
    """Answers requests to decode with a script, where it has one.

    Attributes:
        script: in place of what engines answer.
        prefill_script: the same for prefills.
        asked: how many requests a script has answered.
        pulls: what is kept elsewhere for such a request, as an engine that accepts it does.
    """

    script: Script | None = None
    prefill_script: Script | None = None
    asked: int = 0
    pulls: bool = True

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        params = (await http.json()).get("kv_transfer_params") or {}
        prefills = params.get("do_remote_decode")
        script = self.prefill_script if prefills else self.script
        if script is None or (params.get("headway") or {}).get("copies"):
            return await super()._generate(http)
        self.asked += 1
        if self.pulls and params.get("do_remote_prefill"):
            del self.engines[params["remote_engine_id"]].kept[params["remote_request_id"]]
        return await script(http)
