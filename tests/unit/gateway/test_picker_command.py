"""`headway picker`: what it answers without any engine, with TLS, and what it cannot serve."""

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
COORDINATED = 'coordinator: {endpoint: "tcp://127.0.0.1:5700"}'
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


def written_key(path: Path, password: bytes | None = None) -> ec.EllipticCurvePrivateKey:
    """Write a new private key, which is encrypted where there is a password."""
    key = ec.generate_private_key(ec.SECP256R1())
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    return key


def certificate(folder: Path) -> Path:
    """Write a certificate for this machine, signed by itself, and its key."""
    chain, key = folder / "certificate.pem", written_key(folder / "key.pem")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "picker")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
    signed = builder.sign(key, hashes.SHA256())
    chain.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return chain


def tls(chain: str = "certificate", key: str = "key") -> str:
    """The options for files in a folder that is not known yet."""
    return f"--certificate {{0}}/{chain}.pem --private-key {{0}}/{key}.pem"


def test_it_answers_with_tls(headway_command: list[str], tmp_path: Path) -> None:
    chain = certificate(tmp_path)
    files = tls().format(tmp_path).split()
    with running(headway_command, "picker", write(tmp_path), *files, "--port", "0") as process:
        address = next_line(process).split()[-1]
        trusted = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(address, trusted) as channel:
            assert health(channel, "liveness") == SERVING


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        (PREFILL, "", "instances: prefill-0 is a prefill instance: the picker places"),
        ("migration: {name: star}", "", "migration: the picker places requests and does not move"),
        (COORDINATED, "", "coordinator: the picker decides by itself"),
        ("routing: {name: nearest}", "", "routing: no routing policy 'nearest'"),
        ("routing: {name: bfio}", "", "bfio requires forecasts"),
        ("", "--private-key key.pem", "--certificate and --private-key belong together"),
        ("", "--port 99999", "--port 99999: a port is a number from 0 to 65535"),
        ("", "--port -1", "--port -1: a port is a number from 0 to 65535"),
        ("", "--host [2001:db8::1] --port 9", "cannot listen on [2001:db8::1]:9"),
        ("", "--host 192.0.2.1 --port 9", "cannot listen on 192.0.2.1:9"),
        ("", "--port {taken}", "cannot listen on 127.0.0.1:{taken}"),
        ("", tls("missing"), "picker: --certificate {}/missing.pem: No such file or directory"),
        ("", tls("garbage"), "picker: --certificate {}/garbage.pem: no PEM certificate"),
        ("", tls("empty"), "picker: --certificate {}/empty.pem: no PEM certificate"),
        ("", tls(key="missing"), "picker: --private-key {}/missing.pem: No such file"),
        ("", tls(key="garbage"), "picker: --private-key {}/garbage.pem: no PEM private key"),
        ("", tls(key="empty"), "picker: --private-key {}/empty.pem: no PEM private key"),
        ("", tls(key="secret"), "picker: --private-key {}/secret.pem: no PEM private key, or"),
        ("", tls(key="other"), "picker: --private-key {0}/other.pem: not the key of {0}/certifi"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(
    tmp_path: Path, more: str, options: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    certificate(tmp_path)
    (tmp_path / "garbage.pem").write_bytes(b"\xff\0garbage")
    (tmp_path / "empty.pem").touch()
    written_key(tmp_path / "other.pem")
    written_key(tmp_path / "secret.pem", b"secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        filled = [
            text.format(tmp_path, taken=taken.getsockname()[1]) for text in (options, message)
        ]
        assert main(["picker", "--config", str(write(tmp_path, more)), *filled[0].split()]) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("headway picker: ")
    assert filled[1] in line
