"""What no single client can use up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.openai.body_memory import BodyMemory, FairShares, client_of
from rescheduler.openai.openai_request import RequestRefusedError


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_neither_all_nor_one_have_more_than_they_may(
    asked: list[tuple[str, int]], most: int, share: int
) -> None:
    shares, given_out = FairShares(most, share), []
    for client, count in asked:
        if shares.take(client, count):
            given_out.append((client, count))
        held = sum(count for _, count in given_out)
        assert shares.held == held <= most
        for one in "abc":
            assert sum(count for client, count in given_out if client == one) <= share
        if len(given_out) > 5:
            client, count = given_out.pop(0)
            shares.take(client, -count)
    for client, count in given_out:
        assert shares.take(client, -count)
    assert shares.held == 0 and not shares._of


def test_a_body_is_counted_as_it_grows_and_until_it_ends() -> None:
    memory = BodyMemory(largest_mb=1, most_mb=4, share=0.5)
    with memory.kept("a", None) as one, memory.kept("a", 1 << 20) as two:
        assert memory.held == 0
        one.grow(1 << 20)
        with pytest.raises(RequestRefusedError) as larger:
            one.grow(1)
        assert larger.value.status == 413
        two.grow(1 << 20)
        with memory.kept("a", None) as three, pytest.raises(RequestRefusedError) as full:
            three.grow(1)
        assert full.value.status == 503
        with memory.kept("b", None) as other:
            other.grow(1 << 20)
        two.be(10)  # smaller once it has been read
        assert memory.held == (1 << 20) + 10
    assert memory.held == 0
    with pytest.raises(RequestRefusedError), memory.kept("a", (1 << 20) + 1):
        pass


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 7, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 7, 0, 3), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_network_of_many_addresses_is_one_client(address: object, client: str) -> None:
    assert client_of(address) == client
