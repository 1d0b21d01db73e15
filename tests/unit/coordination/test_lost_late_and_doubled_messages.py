"""Two proxies and their coordinator, whatever becomes of their messages and of either of them."""

from collections.abc import Iterator

import pytest
from conversing_proxies import LOST, Model
from hypothesis import settings

from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.placeable import MoveOutcome
from rescheduler.placement.request_states import Placed, Prefilling

TestMessages = Model.TestCase
TestMessages.settings = settings(stateful_step_count=60)


@pytest.fixture
def model() -> Iterator[Model]:
    """It has begun; at its end all agree, as after every example."""
    made = Model()
    try:
        made.start()
        yield made
    finally:
        made.teardown()


def test_a_place_whose_notice_is_lost_is_offered_again(model: Model) -> None:
    model.all_agree_in_the_end()
    model.arrive(p=0)
    model.proxy_sends(p=0, beat=False)
    model.report_comes_first(p=0)
    model.coordinator_sends(beat=False)
    assert model.proxies[0].down.pop().answers
    model.all_agree_in_the_end()


def test_a_proxy_that_was_silent_for_long_is_decided_for_again_at_once(model: Model) -> None:
    model.converse(beats=300)
    model.time_passes(seconds=LOST + 1)
    model.coordinator_sends(beat=True)
    assert not model.sessions.by_name, "forgotten"
    model.arrive(p=0)
    model.converse(beats=4)
    assert all(proxy.link.alive for proxy in model.proxies)
    assert model.proxies[0].running(Prefilling), "no place"


def test_a_request_can_move_again_once_its_client_reads(model: Model) -> None:
    request = model.generating(p=0)
    mirror = model.mirror(p=0)
    for blocks in (True, False):
        request.client_blocks = blocks
        model.do(action=lambda: model.proxies[0].link.changed(request))
        model.converse(beats=1)
        assert mirror.can_move is not blocks
        request.client_blocks = not blocks
        model.converse(beats=1)
        assert mirror.can_move is blocks


def test_a_running_request_waits_for_an_instance_though_no_new_one_is_taken(model: Model) -> None:
    """Whoever placed it before: a coordinator that has just started is asked for another place."""
    request = model.generating(p=0)
    model.coordinator_dies()
    model.converse(beats=4)
    for instance in model.shared.cluster.all[1:]:
        instance.breaker.failed(model.now, certain=True)
    model.do(action=lambda: request.fail(unsent=False))
    model.do(action=lambda: model.proxies[0].start(request))
    model.converse(beats=4)
    assert not model.proxies[0].flows[request].done(), "neither placed nor refused"
    for instance in model.shared.cluster.all[1:]:
        instance.breaker.succeeded()
    model.do(action=model.shared.cluster.dispatcher.wake)
    model.converse(beats=4)
    assert model.proxies[0].running(Placed) == [request]


def test_what_only_an_engine_has_counted_is_not_lost_at_the_end(model: Model) -> None:
    """As of an answer that comes as a whole, whose tokens its proxy does not see."""
    request = model.generating(p=0)
    session, mirror = model.session(p=0), model.mirror(p=0)
    mirror.reported(8, 50)
    model.do(action=lambda: model.proxies[0].link.ended(request, by_itself=True))
    model.do(action=lambda: model.proxies[0].flows.pop(request))
    model.converse(beats=2)
    assert not session.mirrors
    assert mirror.generated_tokens == 50


def test_of_several_answers_an_engine_counts_only_one_each(model: Model) -> None:
    two = read_request(COMPLETIONS, b'{"prompt": "a", "max_tokens": 100, "n": 2}')
    model.do(action=lambda: model.begin(model.proxies[0], two))
    model.converse(beats=4)
    mirror = model.mirror(p=0)
    before = mirror.context_tokens
    mirror.reported(8, 50)
    assert mirror.context_tokens == before


def test_a_proxy_that_nobody_answers_says_so_once(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        model.time_passes(seconds=11.0)
        model.proxy_sends(p=0, beat=True)
    said = [record.message for record in caplog.records if "no coordinator" in record.message]
    assert len(said) == 1
    assert "with the same keys?" in said[0]


def test_an_order_that_is_given_last_of_all_is_carried_out(model: Model) -> None:
    request = model.generating(p=0)
    target = model.order_elsewhere(p=0)
    model.all_agree_in_the_end()
    assert request.instance.name == target.name
    assert model.ordered[0].result().outcome == "moved"


def test_a_move_is_known_to_have_landed_though_what_said_so_was_lost(model: Model) -> None:
    model.generating(p=0)
    proxy = model.proxies[0]
    model.order_elsewhere(p=0)
    model.converse(beats=1)
    (request,) = proxy.moves
    model.do(action=lambda: model._end_move(proxy, request, lands=True))
    proxy.link._moves.clear()
    model.all_agree_in_the_end()
    assert model.ordered[0].result() == MoveOutcome("moved"), "and nobody knows its pause"
