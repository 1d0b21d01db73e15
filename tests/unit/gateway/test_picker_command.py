"""`headway picker` as a command."""

import datetime
import ipaddress
import signal
import socket
from pathlib import Path

import grpc
import pytest
from chosen_ports import free_port
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from running_command import next_line, running

from rescheduler.commands.command_line import main
from rescheduler.gateway.messages import (
    HEALTH,
    PROCESSOR,
    HealthCheckRequest,
    HealthCheckResponse,
)

DEPLOYMENT = """\
model: m
instances:
  - {{name: decode-0, role: decode, url: "http://127.0.0.1:{dead}"}}
"""
PREFILL = '  - {name: prefill-0, role: prefill, url: "http://127.0.0.1:1"}\n'
SERVING, NOT_SERVING = 1, 2


def write(folder: Path, more: str = "") -> Path:
    path = folder / "deployment.yaml"
    path.write_text(DEPLOYMENT.format(dead=free_port()) + more)
    return path


def health(channel: grpc.Channel, service: str) -> int:
    check = channel.unary_unary(
        f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
    )
    return int(check(HealthCheckRequest(service=service)).status)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_answers_without_any_engine_and_ends_when_asked(
    headway_command: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    with running(headway_command, "picker", write(tmp_path), "--port", str(port)) as process:
        assert next_line(process) == f"picking on 127.0.0.1:{port}\n"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert health(channel, "liveness") == SERVING
            for service in ("", "readiness", PROCESSOR):
                assert health(channel, service) == NOT_SERVING
            with pytest.raises(grpc.RpcError, match="no service 'other'"):
                health(channel, "other")
        process.send_signal(number)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert "Traceback" not in errors


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for this machine, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "picker")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(
        builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def test_it_answers_with_tls(headway_command: list[str], tmp_path: Path) -> None:
    chain, key = certificate(tmp_path)
    tls = ["--certificate", str(chain), "--private-key", str(key), "--port", "0"]
    with running(headway_command, "picker", write(tmp_path), *tls) as process:
        address = next_line(process).split()[-1]
        trusted = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(address, trusted) as channel:
            assert health(channel, "liveness") == SERVING


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        (PREFILL, [], "instances: prefill-0 is a prefill instance: the picker places"),
        ("migration: {name: star}", [], "migration: the picker places requests and does not move"),
        (
            'coordinator: {endpoint: "tcp://127.0.0.1:5700"}',
            [],
            "coordinator: the picker decides by itself",
        ),
        ("routing: {name: nearest}", [], "routing: no routing policy 'nearest'"),
        ("routing: {name: bfio}", [], "bfio requires forecasts"),
        ("", ["--private-key", "key.pem"], "--certificate and --private-key belong together"),
        ("", ["--port", "99999"], "--port 99999: a port is a number from 0 to 65535"),
        ("", ["--port", "-1"], "--port -1: a port is a number from 0 to 65535"),
        ("", ["--host", "[2001:db8::1]", "--port", "9"], "cannot listen on [2001:db8::1]:9"),
        ("", ["--host", "192.0.2.1", "--port", "9"], "cannot listen on 192.0.2.1:9"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(
    tmp_path: Path,
    more: str,
    options: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["picker", "--config", str(write(tmp_path, more)), *options]) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("headway picker: ")
    assert message in line


@pytest.mark.parametrize(
    ("chain", "key", "message"),
    [
        ("missing.pem", "key.pem", "--certificate {}/missing.pem: No such file or directory"),
        ("garbage.pem", "key.pem", "--certificate {}/garbage.pem: no PEM certificate"),
        ("empty.pem", "key.pem", "--certificate {}/empty.pem: no PEM certificate"),
        ("certificate.pem", "missing.pem", "--private-key {}/missing.pem: No such file"),
        ("certificate.pem", "garbage.pem", "--private-key {}/garbage.pem: no PEM private key"),
        ("certificate.pem", "empty.pem", "--private-key {}/empty.pem: no PEM private key"),
        ("certificate.pem", "secret.pem", "--private-key {}/secret.pem: no PEM private key, or"),
        ("certificate.pem", "other.pem", "--private-key {0}/other.pem: not the key of {0}/certifi"),
    ],
)
def test_a_file_of_tls_that_is_wrong_is_named(
    tmp_path: Path, chain: str, key: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    certificate(tmp_path)
    (tmp_path / "garbage.pem").write_bytes(b"\xff\0garbage")
    (tmp_path / "empty.pem").touch()
    other = ec.generate_private_key(ec.SECP256R1())
    password = serialization.BestAvailableEncryption(b"secret")
    for name, encryption in (
        ("other.pem", serialization.NoEncryption()),
        ("secret.pem", password),
    ):
        pem = other.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        (tmp_path / name).write_bytes(pem)
    files = ["--certificate", str(tmp_path / chain), "--private-key", str(tmp_path / key)]
    assert main(["picker", "--config", str(write(tmp_path)), *files]) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(f"headway picker: {message.format(tmp_path)}")


def test_a_port_in_use_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["picker", "--config", str(write(tmp_path)), "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err.splitlines()[-1]
