"""The coordinator's end of its conversations, without sockets and without engines."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rescheduler.coordination.messages import NOWHERE, Record
from rescheduler.coordinator.session import Mirror, Shared
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.accounts import Accounts
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import LengthFactors, Placements
from rescheduler.placement.waiting_line import Pool
from rescheduler.routing.heuristics import JSQLoad
from rescheduler.step_time.profile import MeanStepTime

RECORD = Record(
    handle=1,
    id="id",
    name="name",
    external_id="cmpl-name",
    ticket=0,
    for_prefill=False,
    waited=0.0,
    instance=NOWHERE,
    destination=NOWHERE,
    hop=-1,
    prompt_tokens=8,
    generated_tokens=0,
    generated_at_move=None,
    max_tokens=None,
    movable=True,
    several=False,
    can_move=False,
    moving=False,
    generating=False,
    on_its_way=False,
    avoid=[],
)
"""A request that waits for nothing, and is nowhere."""


def shared_by_sessions(
    incarnation: str,
    instances: list[InstanceState],
    options: ProxyOptions,
    clock: Callable[[], float],
    background: Callable[[Any], "asyncio.Task[None]"],
) -> Shared:
    """What sessions have in common; failures that proxies report count for nothing."""
    placements, step, settled = Placements[Mirror](), MeanStepTime(), asyncio.Event()
    settled.set()
    accounts, forecasts = Accounts(options.accounts), LiveForecasts(None)

    def began(request: Mirror) -> None:
        accounts.began(request)
        forecasts.began(request)

    def ended(request: Mirror, by_itself: bool) -> None:
        accounts.ended(request, by_itself)
        forecasts.ended(request, by_itself)

    cluster: Any = SimpleNamespace(
        all=instances,
        placements=placements,
        dispatcher=Dispatcher(
            placements, instances, JSQLoad(), options, step, clock, pool=Pool(None, accounts)
        ),
        accounts=accounts,
        step=step,
        length_factors=LengthFactors(),
        background=background,
        forecasts=forecasts,
        began=began,
        ended=ended,
        may_leave=lambda instance: False,
    )
    return Shared(incarnation, cluster, options.pool, {}, clock, lambda: None, settled)
