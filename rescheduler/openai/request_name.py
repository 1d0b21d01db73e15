"""What a client calls its request."""

import re

from rescheduler.openai.openai_request import ClientRequest

__all__ = ["given_name"]

_NAME = re.compile(r"[\w.:-]{1,128}")


def given_name(header: str | None, client: ClientRequest) -> str | None:
    """Return the name that a client gave a request; None if it gave none that can be one.

    Args:
        header: ``X-Request-Id``.
        client: what it asks for; its ``request_id`` counts where there is no header.
    """
    name = header or client.request_id
    return name if name is not None and _NAME.fullmatch(name) else None
