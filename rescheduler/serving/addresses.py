"""Addresses to listen on, as users read them."""

from rescheduler.engines.deployment import DeploymentError

__all__ = ["cannot_listen", "url_of"]


def url_of(host: str, port: int) -> str:
    """Return the URL of an HTTP server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def cannot_listen(option: str, host: str, port: int, error: OSError) -> DeploymentError:
    """Return the error of an address that cannot be listened on.

    Args:
        option: of the deployment, that gives it.
        host: address.
        port: port.
        error: that came of it.
    """
    return DeploymentError(f"{option}: cannot listen on {host}:{port}: {error.strerror or error}")
