"""Endpoints that a proxy may name as its own."""

import pytest

from rescheduler.coordination.peer_sockets import PeerEndpointError, checked_endpoint


@pytest.mark.parametrize(
    ("named", "address", "endpoint"),
    [
        ("tcp://127.0.0.1:50123", "127.0.0.1", "tcp://127.0.0.1:50123"),
        ("tcp://10.0.0.5:1024", "::ffff:10.0.0.5", "tcp://10.0.0.5:1024"),
        ("tcp://[::ffff:10.0.0.5]:65535", "10.0.0.5", "tcp://10.0.0.5:65535"),
        ("tcp://[2001:DB8:0::1]:5000", "2001:db8::1", "tcp://[2001:db8::1]:5000"),
        ("tcp://[::1]:5000", None, "tcp://[::1]:5000"),
    ],
)
def test_one_on_the_proxy_itself(named: str, address: str | None, endpoint: str) -> None:
    assert checked_endpoint(named, address) == endpoint


@pytest.mark.parametrize(
    "named",
    [
        "ipc://socket",
        "inproc://peers",
        "udp://10.0.0.5:5000",
        "tcp://10.0.0.5:22",
        "tcp://10.0.0.5:0",
        "tcp://10.0.0.5:65536",
        "tcp://10.0.0.5:*",
        "tcp://*:5000",
        "tcp://eth0:5000",
        "tcp://localhost:5000",
        "tcp://0.0.0.0:5000",
        "tcp://[::]:5000",
        "tcp://224.0.0.1:5000",
        "tcp://10.0.0.6:5000",
        "tcp://127.0.0.1:5000",
        "tcp://10.0.0.5:5000;10.0.0.6:5000",
        "tcp://10.0.0.5:5000/",
        "tcp://10.0.0.5:5000\n",
        "tcp://10.0.0.555:5000",
        "tcp://10.0.0.5:٥٠٠٠",
        "",
    ],
)
def test_one_that_others_must_not_connect_to(named: str) -> None:
    with pytest.raises(PeerEndpointError):
        checked_endpoint(named, "10.0.0.5")


def test_the_loopback_is_only_for_proxies_that_are_there() -> None:
    with pytest.raises(PeerEndpointError, match="on the loopback"):
        checked_endpoint("tcp://127.0.0.1:5000", None, loopback=False)
    with pytest.raises(PeerEndpointError, match="on another machine"):
        checked_endpoint("tcp://10.0.0.5:5000", None, loopback=True)
