"""A browser, and what it complained of."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright
from tokenizers import Tokenizer

_SECONDS = 60

Open = Callable[..., Awaitable[Page]]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Chromium, as this machine has it."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        pytest.fail("no Chromium: apt-get install chromium")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=found)
        yield running
        await running.close()


@pytest.fixture
async def open_page(browser: Browser) -> AsyncIterator[Open]:
    """Open an address; afterwards no script has failed, and the token was in no address."""
    complaints: list[str] = []
    asked: list[str] = []

    async def opened(url: str, **options: Any) -> Page:
        size = {"width": 1440, "height": 900}
        page = await browser.new_page(**({"viewport": size} | options))
        page.set_default_timeout(1000 * _SECONDS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))

        def said(message: Any) -> None:
            # Chromium itself reports each answer that is an error, and each that does not come.
            if message.type in ("error", "warning") and "Failed to load" not in message.text:
                complaints.append(message.text)

        page.on("console", said)
        await page.goto(url)
        return page

    yield opened
    assert complaints == []
    assert not [url for url in asked if "token=" in url.partition("#")[0]]


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
