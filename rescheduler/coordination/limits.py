"""The bounds of everything that a proxy, its peers and the coordinator say to each other.

What is beyond them is refused where it is read, as a whole, and counted: no Headway says it. Who
speaks keeps to them, too; `docs/many-proxies.md` lists those that a deployment can reach.
"""

from typing import Annotated

import msgspec

__all__ = [
    "LARGEST_MESSAGE",
    "MOST",
    "MOST_ANSWERS",
    "MOST_FAILURES",
    "MOST_INSTANCES",
    "MOST_ORDERS",
    "MOST_REQUESTS",
    "MOST_SESSIONS",
    "MOST_TOKENS",
    "MOST_UNREAD",
    "NOWHERE",
    "Count",
    "Duration",
    "Index",
    "Outcome",
    "Requests",
    "StepSeconds",
    "Text",
    "Tokens",
    "Word",
]

LARGEST_MESSAGE = 8 << 20
"""Bytes of a message; a connection that sends a larger one is closed."""

MOST_UNREAD = 64
"""Messages of one connection that wait to be sent or read; what does not fit is lost."""

MOST_SESSIONS = 64
"""Proxies of one coordinator."""

MOST_REQUESTS = 16_384
"""Requests of one proxy, four times as many as it can relay tokens for."""

MOST_INSTANCES = 4_096
"""Instances of a deployment."""

MOST_ANSWERS, MOST_ORDERS, MOST_FAILURES = 1_024, 256, 64
"""Places, orders to move and failed calls in one message; others come in the next."""

MOST_TOKENS = 2**24
"""Tokens of a prompt, or of an answer."""

MOST = 2**40
"""Largest number of any message: no count of requests, tokens or messages comes near it."""

NOWHERE = -1
"""In place of an instance's index in the deployment."""

_PRINTABLE = (  # neither control characters nor those that change the order or are not seen
    r"^[^\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]*\Z"
)

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=MOST_REQUESTS)]
Index = Annotated[int, msgspec.Meta(ge=NOWHERE, lt=MOST_INSTANCES)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # and no NaN
StepSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=60.0)]
Word = Annotated[str, msgspec.Meta(max_length=160, pattern=_PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=512, pattern=_PRINTABLE)]
Outcome = Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]
