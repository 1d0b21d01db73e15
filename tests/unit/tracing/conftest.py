import pytest


@pytest.fixture(autouse=True)
def sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent soon, and however long that takes on a busy machine."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
