"""The certificate that the picker shows to gateways, and its key."""

import ssl
from pathlib import Path

import grpc

from data_collection.secret_file import warn_of_open_secret
from rescheduler.engines.deployment import DeploymentError

__all__ = ["server_credentials"]


def server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """Return what a gRPC server needs for TLS.

    gRPC does not say what is wrong with a file, so that OpenSSL reads both first.

    Args:
        certificate: PEM file of the certificate and its chain.
        key: PEM file of its private key.

    Raises:
        DeploymentError: a file cannot be read, or is not what it should be.
    """
    pair = _read("--private-key", key), _read("--certificate", certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certificate)
    except ssl.SSLError as error:
        raise DeploymentError(f"--certificate {certificate}: no PEM certificate") from error
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # else it asks for one
    except ssl.SSLError as error:
        if error.reason is None:
            why = "no PEM private key, or one with a password"
        elif error.reason in ("KEY_TYPE_MISMATCH", "KEY_VALUES_MISMATCH"):
            why = f"not the key of {certificate}"
        else:  # such as a certificate that is too weak
            raise DeploymentError(f"--certificate {certificate}: {error}") from error
        raise DeploymentError(f"--private-key {key}: {why}") from error
    warn_of_open_secret(key)
    return grpc.ssl_server_credentials([pair])


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DeploymentError(f"{option} {path}: {error.strerror}") from error
