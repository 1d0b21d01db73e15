"""A picture of the page at a moment of one recorded log, or of two beside each other.

    python -m benchmarks.page_picture LOG [BESIDE] --at SECONDS --png OUT [--dark]
        [--width PIXELS] [--height PIXELS]

Needs ``pip install 'headway[browser]'`` and the system's Chromium (``apt-get install chromium``).
"""

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from rescheduler.page.snapshot_log import Log, read_log
from rescheduler.serving.replay import replay_app

_TOKEN = "of-this-picture"
_SECONDS = 60.0
_SHARPNESS = 1.5  # pixels of the picture to one of the page

_GO_TO = """time => {
  const slider = document.querySelector("#player input");
  slider.value = time;
  slider.dispatchEvent(new Event("input"));
}"""
_SHOWS = """time => document.querySelector("#player output").dataset.time === String(time)"""


def main() -> None:
    parser = argparse.ArgumentParser(description="a picture of the page, from recorded logs")
    parser.add_argument("logs", type=Path, nargs="+", help="one log, or two")
    parser.add_argument("--at", type=float, required=True, help="seconds from the beginning")
    parser.add_argument("--png", type=Path, required=True, help="file to write")
    parser.add_argument("--dark", action="store_true", help="in dark colours")
    parser.add_argument("--width", type=int, default=1440, help="of the page, in its pixels")
    parser.add_argument("--height", type=int, default=1050, help="of the picture, likewise")
    options = parser.parse_args()
    logs = [read_log(path) for path in options.logs]
    size = options.width, options.height
    asyncio.run(take(logs, options.at, options.png, options.dark, size))


async def take(
    logs: Sequence[Log], at: float, path: Path, dark: bool, size: tuple[int, int]
) -> None:
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise RuntimeError("there is no Playwright: pip install 'headway[browser]'") from error
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise RuntimeError("there is no Chromium: apt-get install chromium")
    runner = web.AppRunner(replay_app(logs, _TOKEN), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/ui#token={_TOKEN}"
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium)
            page = await browser.new_page(
                viewport={"width": size[0], "height": size[1]},
                device_scale_factor=_SHARPNESS,
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
            )
            page.set_default_timeout(1000 * _SECONDS)
            await page.goto(url)
            await page.wait_for_function(_SHOWS, arg=0)
            await page.evaluate(_GO_TO, at)
            await page.wait_for_function(_SHOWS, arg=at)
            await page.screenshot(path=path)
            await browser.close()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
