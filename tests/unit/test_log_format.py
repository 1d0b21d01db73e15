"""A log has a line a message, whoever wrote a part of it, and warns of secrets that are none."""

import io
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.live.zmq_sockets import create_keys, shared_secret
from rescheduler.commands.command_line import main
from rescheduler.commands.event_loop import LOG_FORMAT, LOG_TIME, EscapingFormatter
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.upstream import engine_key


def logged(message: str, *parts: object, exc_info: object = None) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(EscapingFormatter(LOG_FORMAT, LOG_TIME))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning(message, *parts, exc_info=exc_info)  # type: ignore[arg-type]
    return out.getvalue()


@given(st.text())
def test_no_name_writes_a_line_of_its_own_or_commands_a_terminal(name: str) -> None:
    line = logged("proxy %s: gone", name)
    assert line.endswith(": gone\n")
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line and "\x9b" not in line and "\u202e" not in line
    line.encode()


def test_what_is_harmless_stays_as_it_is_and_the_rest_is_told() -> None:
    line = logged("an engine: %s", "Grüße \N{GRINNING FACE}\n2026-01-01 forged\x1b[2J")
    assert line.endswith("an engine: Grüße \N{GRINNING FACE}\\n2026-01-01 forged\\x1b[2J\n")


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("one\x1b[2J")
    except ValueError:
        lines = logged("failed", exc_info=sys.exc_info()).splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: one\\x1b[2J"


def test_an_error_on_the_command_line_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dataset", "inspect", str(tmp_path / "none\x1b[2J")]) == 1
    assert "none\\x1b[2J" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o440, False), (0o604, True), (0o666, True)]
)
def test_a_secret_that_others_can_use_is_warned_of(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    create_keys(keys)
    secret, token = keys / "watcher.key_secret", tmp_path / "key"
    token.write_text("s3cret")
    secret.chmod(mode)
    token.chmod(mode)
    shared_secret(keys, "watcher")
    engine_key(ProxyOptions(engine_key_file=str(token)))
    told = [record.getMessage() for record in caplog.records]
    if warned:
        assert [
            f"mode {mode:04o}): chmod 600 {path}" in one
            for path, one in zip((secret, token), told, strict=True)
        ] == [True, True]
    else:
        assert told == []
