"""Why the proxy answers some requests otherwise than vLLM, as the documentation shows it."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import groupby

import msgspec

from benchmarks.equality.comparing import Difference

REASONS: dict[str, tuple[str, ...]] = {
    "What only the proxy may tell the engines is refused from clients.": ("*kv_transfer_params*",),
    "A stream that an engine refuses before its first token gets the refusal's status; vLLM has "
    "answered 200 by then.": ('POST /v1/*completions: `{"stream": true, *',),
    "The proxy has its own words for what it refuses; `NaN`, `Infinity` and lone surrogates are "
    "no JSON.": (
        "POST *: an empty body",
        "POST *: a list as body",
        "POST *: a string as body",
        "POST *: `null` as body",
        "POST *: invalid JSON*",
        "POST *: JSON and something after it",
        "POST *: `NaN` as a number",
        "POST *: `Infinity` in an unknown field",
        "POST *: a lone surrogate",
        "POST *: a raw line feed in a string",
        "POST *: lists nested 2,000 deep",
        "POST *: Content-Type *",
        "POST *: no Content-Type*",
    ),
    "Bodies are unpacked, and what cannot be is refused; vLLM does not look.": (
        "POST *: gzip",
        "POST *: an unknown Content-Encoding",
    ),
    "An engine counts fields that the proxy added, in its message.": (
        "POST *: no `messages`",
        "POST *: `{}` as a chat",
    ),
    "No instance knows the responses of the others.": ("* /v1/responses*",),
    "Forms are not routed: ask an engine directly.": ("POST /v1/audio/*",),
    "It is about one engine, or for whoever operates it: ask it directly.": (
        "GET /load",
        "GET /kv_event_sources",
        "GET /docs",
        "GET /redoc",
        "GET /openapi.json",
        "POST /scale_elastic_ep",
        "POST /is_scaling_elastic_ep",
        "POST */render: *",
        "POST /inference/v1/generate: *",
    ),
    "The proxy has its own.": ("* /metrics", "GET /ready"),
    "HEAD is answered wherever GET is.": ("HEAD *",),
    "Errors have OpenAI's shape here, too; `Allow` names HEAD, and an endpoint that only other "
    "models have is there.": (
        "GET *",
        "OPTIONS *",
        "PUT *",
        "DELETE *",
        "PATCH *",
        "BREW *",
        "POST /*",
    ),
}
"""Reason → the requests that it explains; ``*`` stands for anything. The first one counts."""


def explained(differences: Sequence[Difference]) -> list[Difference]:
    return [
        msgspec.structs.replace(difference, reason=_reason(difference.request))
        for difference in differences
    ]


def _reason(request: str) -> str:
    for reason, patterns in REASONS.items():
        if any(fnmatchcase(request, pattern) for pattern in patterns):
            return reason
    return ""


def table(cases: int, differences: Sequence[Difference]) -> str:
    """Return differences as Markdown: each reason, and the requests that it explains."""
    order = [*REASONS, ""]
    alike = cases - len(differences)
    lines = [
        f"Of {cases} requests, {alike} were answered alike. The other {len(differences)}:",
        "",
        "| request | vLLM | proxy | differs |",
        "|---|---:|---:|---|",
    ]
    ranked = sorted(differences, key=lambda one: order.index(one.reason))  # stable
    for reason, ones in groupby(ranked, key=lambda one: one.reason):
        lines.append(f"| **{reason or 'unexplained'}** | | | |")
        for one in ones:
            differs = ", ".join(one.fields) or "status"
            lines.append(f"| {_escaped(one.request)} | {one.vllm} | {one.proxy} | {differs} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
