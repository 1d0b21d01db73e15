"""The states of a live request: what follows what, and that nothing is lost on the way."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_requests import instance_state, live_request

from rescheduler.placement.live_request import IllegalTransitionError, LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.placement.request_states import (
    TRANSITIONS,
    Copying,
    Decoding,
    Finished,
    Freezing,
    Frozen,
    Kept,
    Landing,
    Move,
    Placed,
    Prefilling,
    RequestState,
    Returned,
    Unanswered,
    Waiting,
)

DOCS = Path(__file__).parents[3] / "docs"
PARAMS = {"remote_request_id": "blocks"}


instance = partial(instance_state, control="a client")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_sequence_of_events_loses_a_slot_a_future_or_kept_blocks(data: st.DataObject) -> None:
    asyncio.run(live(data))


async def live(data: st.DataObject) -> None:
    """Take two requests on three decode instances through any legal events to their ends."""
    placements: Placements[LiveRequest] = Placements()
    prefill, decodes = instance("prefill", "prefill"), [instance(name) for name in "abc"]
    requests = [live_request(name, placements=placements) for name in ("r1", "r2")]
    moves: list[tuple[LiveRequest, Move]] = []
    kept: dict[LiveRequest, Kept] = {}

    def free(request: LiveRequest, freed: Kept | None) -> None:
        if freed is not None:  # perhaps in vain: after a freeze without an answer, in a prefill
            assert kept.pop(request, freed) == freed

    def prefilled(request: LiveRequest) -> None:
        kept[request] = Kept(prefill, request.prefill_hop)
        request.prefilled(PARAMS, 7)

    def prefill_failed(request: LiveRequest) -> None:
        hop = request.prefill_hop
        assert request.prefill_failed() == Kept(prefill, hop)

    def accepted(request: LiveRequest) -> None:
        request.accepted()
        kept.pop(request, None)

    def move_to(request: LiveRequest) -> None:
        moves.append((request, request.move_to(data.draw(st.sampled_from(decodes)))))

    def frozen(request: LiveRequest) -> None:
        assert request.instance is not None
        kept[request] = Kept(request.instance, request.hop)
        request.frozen([1, 2], PARAMS)

    def give_back(request: LiveRequest) -> None:
        request.give_back()
        kept.pop(request, None)  # the caller releases the source

    def fail(request: LiveRequest) -> None:
        unsent = data.draw(st.booleans()) and not request.generating
        if data.draw(st.booleans()):
            for one in decodes:
                one.breaker.failed(0.0, certain=True)
        landing = isinstance(request.state, Landing)
        free(request, request.fail(unsent))
        if landing and not unsent:
            kept.pop(request, None)  # whether the instance has it nobody knows: a lease ends

    def finish(request: LiveRequest) -> None:
        free(request, request.finish())
        assert request not in kept

    def token(request: LiveRequest) -> None:
        was = request.state
        arrival = request.token(1.0)
        assert arrival.landed == isinstance(was, Landing)
        if arrival.first:
            kept.pop(request, None)

    def place(request: LiveRequest) -> None:
        request.place(data.draw(st.sampled_from(decodes)))

    events: dict[type[RequestState], list[Callable[[LiveRequest], object]]] = {
        Waiting: [lambda r: r.begin_prefill(prefill), place, finish],
        Prefilling: [prefilled, prefill_failed, finish],
        Placed: [accepted, token, LiveRequest.turned_away, fail, finish],
        Returned: [accepted, token, fail, finish],
        Decoding: [move_to, token, fail, finish],
        Copying: [LiveRequest.freeze, LiveRequest.not_copied, token, fail, finish],
        Freezing: [frozen, LiveRequest.not_frozen, LiveRequest.unanswered, token, fail, finish],
        Unanswered: [LiveRequest.never_froze, give_back, token, fail, finish],
        Frozen: [LiveRequest.land, give_back, token, fail, finish],
        Landing: [accepted, token, fail, finish],
    }
    for _ in range(data.draw(st.integers(1, 25))):
        live = [one for one in requests if not isinstance(one.state, Finished)]
        if not live:
            break
        request = data.draw(st.sampled_from(live))
        before = request.state
        if isinstance(before, Waiting) and request in kept:  # prefilled once
            data.draw(st.sampled_from([place, finish]))(request)
        else:
            data.draw(st.sampled_from(events[type(before)]))(request)
        for one in requests:
            holders = [i for i in [prefill, *decodes] if one in placements.on(i)]
            assert holders == ([one.instance] if one.instance else [])
        for owner, move in moves:
            ends = getattr(owner.state, "move", None) is not move
            assert move.landed.done() == ends
            asked = owner.is_copying(move) or owner.is_freezing(move)
            assert move.answered.done() == (not asked)
    for one in requests:
        if not isinstance(one.state, Finished):
            finish(one)
    assert not kept
    assert not any(placements.on(one) for one in [prefill, *decodes])
    assert all(move.answered.done() and move.landed.done() for _, move in moves)


def test_an_illegal_event_raises_and_changes_nothing() -> None:
    request = live_request("r")
    for event in (
        request.prefill_failed,
        request.accepted,
        request.land,
        request.not_frozen,
        request.unanswered,
        request.never_froze,
        request.give_back,
        request.turned_away,
        lambda: request.token(0.0),
        lambda: request.prefilled(PARAMS, 1),
        lambda: request.frozen([], PARAMS),
        lambda: request.fail(True),
    ):
        with pytest.raises(IllegalTransitionError, match="Waiting"):
            event()
        assert request.state == Waiting()
    request.finish()
    with pytest.raises(IllegalTransitionError, match="from Finished to Finished"):
        request.finish()
    with pytest.raises(IllegalTransitionError, match="is Finished, not Waiting"):
        request.place(instance("a"))


async def test_a_target_that_fails_returns_the_request_to_a_source_in_service() -> None:
    source, target = instance("a"), instance("b")
    for in_service in (True, False):
        request = live_request("r")
        request.place(source)
        request.token(0.0)
        move = request.move_to(target)
        request.freeze()
        request.frozen([], PARAMS)
        request.land()
        if not in_service:
            source.breaker.failed(0.0, certain=True)
        assert request.fail(unsent=True) == Kept(source, 0)
        assert request.state == (Returned(source) if in_service else Waiting())
        assert request.avoid == {target}
        assert move.landed.result() is None


def test_the_diagram_shows_every_state_and_every_transition() -> None:
    drawn = re.findall(r"^ +(\S+) --> ([^\s:]+)", (DOCS / "migrate.md").read_text(), re.MULTILINE)
    ends = [("[*]", "Waiting"), ("Finished", "[*]")]
    allowed = [(a.__name__, b.__name__) for a, after in TRANSITIONS.items() for b in after]
    assert sorted(drawn) == sorted(allowed + ends)
    assert set(TRANSITIONS) == set(get_args(RequestState))


async def test_a_client_that_leaves_during_a_freeze_disturbs_nobody_else() -> None:
    request = live_request("r")
    request.place(instance("a"))
    request.token(0.0)
    move = request.move_to(instance("b"))
    request.freeze()
    waiting = asyncio.create_task(request.freeze_answered())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not move.answered.done()
    request.finish()
    assert move.answered.done()
    assert move.landed.result() is None
