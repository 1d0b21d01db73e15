"""The page in a browser, as whoever operates a proxy meets it."""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp.test_utils import TestServer
from axe_playwright_python.async_playwright import Axe
from made_up_cluster import MadeUpCluster
from playwright.async_api import Locator, Page, expect
from scripted_cluster import cluster, until
from tokenizers import Tokenizer
from watched_page import TOKEN, page_app, page_served

from rescheduler.page.snapshot import Accuracy, Finishes, LengthErrors, Outlook, SnapshotFeed

Open = Callable[..., Awaitable[Page]]

expect.set_options(timeout=60_000)

DRAWN = "canvas => canvas.toDataURL()"


async def is_live(page: Page) -> None:
    await expect(page.locator("#status")).to_have_text("live")


async def updates(lane: Locator) -> None:
    """Wait until something else is drawn of an instance."""
    canvas = lane.locator("canvas").first
    before = await canvas.evaluate(DRAWN)
    async with asyncio.timeout(60):
        while await canvas.evaluate(DRAWN) == before:
            await asyncio.sleep(0.05)


async def test_it_shows_the_cluster_as_it_changes(open_page: Open) -> None:
    async with page_served(MadeUpCluster(2, 8, 4608, seconds=0.1)) as url:
        page = await open_page(url)
        await is_live(page)
        await expect(page.locator(".lane h3")).to_have_text(["decode-0", "decode-1"])
        await expect(page.locator(".figures dd").first).to_have_text("16")
        await updates(page.locator(".lane").first)
        await expect(page.locator(".moves li.moved").first).to_contain_text("survival, gain 0.21")
        assert "token" not in page.url


async def test_a_table_says_what_the_picture_shows(open_page: Open) -> None:
    async with page_served(MadeUpCluster(2, 8, 4608)) as url:
        page = await open_page(url)
        await is_live(page)
        lane = page.locator(".lane").first
        await lane.locator("summary").focus()
        await page.keyboard.press("Enter")
        row = lane.locator("tbody tr").first
        await expect(row.locator("td")).to_have_count(5)
        await expect(row.locator("td").last).to_have_text(re.compile(r"\d – \d"))
        await expect(lane.locator("canvas")).to_have_attribute(
            "aria-label", re.compile(r"decode-0: \d+ requests?, [\d,]+ of 4,608 tokens")
        )


NARROW = Accuracy(
    requests=312,
    coverage=[0.44, 0.66, 0.79],
    error=45.2,
    bias=-12.3,
    late=0.63,
    alarm="the 80% intervals are too narrow",
    drift="",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_says_how_accurate_the_forecasts_were(open_page: Open, scheme: str) -> None:
    async with page_served(MadeUpCluster(2, 8, 4608, accuracy=NARROW)) as url:
        page = await open_page(url, color_scheme=scheme)
        await is_live(page)
        accuracy = page.get_by_role("region", name="Forecasts, last hour")
        await expect(accuracy).to_contain_text("312 requests scored")
        rows = accuracy.get_by_role("listitem")
        await expect(rows).to_have_text(["50% held 44%", "80% held 66%", "90% held 79%"])
        await expect(accuracy).to_contain_text(
            "Median off by 45 tokens, 12 too short on average; 63% of the ends came after it"
        )
        await expect(accuracy).to_contain_text("▲ the 80% intervals are too narrow")
        await expect(accuracy).to_contain_text("✓ no drift")
        track = accuracy.locator(".track").nth(1)
        drawn = await track.evaluate(
            """track => [...track.children].map((one) => {
              const all = track.getBoundingClientRect(), own = one.getBoundingClientRect();
              return (own.left + (one.className === "held" ? own.width : own.width / 2) - all.left)
                / all.width;
            })"""
        )
        assert drawn == pytest.approx([0.66, 0.8], abs=0.01)
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


async def test_it_judges_nothing_from_few_requests(open_page: Open) -> None:
    few = msgspec.structs.replace(NARROW, requests=1, alarm=None, drift=None)
    async with page_served(MadeUpCluster(1, 3, 4608, accuracy=few)) as url:
        page = await open_page(url)
        accuracy = page.get_by_role("region", name="Forecasts, last hour")
        await expect(accuracy).to_contain_text("1 request scored")
        await expect(accuracy).to_contain_text("○ too few requests to judge the intervals")
        await expect(accuracy).to_contain_text("○ too early to see drift")
        assert "▲" not in await accuracy.inner_text()


CAME = Finishes(forecasts=500, held=0.78, kept=41, broken=1, refused=6)
COMING = Outlook(seconds=60, tokens=[2100, 2500, 2900], foretold=[1900, 2400, 3000], wanted=3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_sets_what_was_expected_beside_what_came(open_page: Open, scheme: str) -> None:
    source = MadeUpCluster(2, 8, 4608, seconds=0.1, finishes=CAME, outlook=COMING)
    async with page_served(source) as url:
        page = await open_page(url, color_scheme=scheme)
        await is_live(page)
        finishes = page.get_by_role("region", name="Finish times")
        await expect(finishes).to_contain_text("latest 500 forecasts")
        await expect(finishes.get_by_role("listitem")).to_have_text(["80% held 78%"])
        await expect(finishes).to_contain_text(
            "Promises since the start: 41 kept, 1 broken, 6 refused"
        )
        ahead = page.get_by_role("region", name="Load ahead")
        await expect(ahead).to_contain_text("2.5K tokens in 60 s (80%: 2.1K – 2.9K)")
        await expect(ahead).to_contain_text("▲ 3 instances wanted, 2 in service")
        said = re.compile(r"Now [\d.]+K? tokens; 1.9K – 3K were expected 60 s ago")
        await expect(ahead).to_contain_text(said)
        await expect(ahead.get_by_role("img")).to_have_attribute("aria-label", said)
        for name in ("band", "foretold", "now"):
            line = ahead.locator(f".{name}")
            await expect(line).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+L"))
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_says_how_good_forecasts_on_arrival_were(open_page: Open, scheme: str) -> None:
    errors = [
        LengthErrors(source="prompt", answers=1, factor=2.24),
        LengthErrors(source="past", answers=500, factor=1.8),
        LengthErrors(source="both", answers=500, factor=1.62),
    ]
    async with page_served(MadeUpCluster(2, 3, 4608, length_errors=errors)) as url:
        page = await open_page(url, color_scheme=scheme)
        await is_live(page)
        lines = page.get_by_role("region", name="Lengths on arrival").get_by_role("listitem")
        await expect(lines).to_have_text(
            [
                "By the prompt: half within a factor of 2.2, latest 1 answer",
                "By the past: half within a factor of 1.8, latest 500 answers",
                "By both: half within a factor of 1.6, latest 500 answers",
            ]
        )
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


async def test_what_was_expected_shows_once_it_has_come(open_page: Open) -> None:
    none = Finishes(forecasts=0, held=None, kept=0, broken=0, refused=0)
    new = Outlook(seconds=60, tokens=[0, 0, 10])
    async with page_served(MadeUpCluster(2, 3, 4608, finishes=none, outlook=new)) as url:
        page = await open_page(url)
        ahead = page.get_by_role("region", name="Load ahead")
        await expect(ahead).to_contain_text("what was expected of now shows after 60 s")
        await expect(ahead.locator(".verdict")).to_be_hidden()
        await expect(ahead.locator(".now")).to_have_attribute("d", re.compile("^M"))
        finishes = page.get_by_role("region", name="Finish times")
        await expect(finishes).to_contain_text("no forecast has come out yet")
        await expect(finishes.get_by_role("list")).to_be_hidden()


async def test_what_nobody_knows_is_not_shown(open_page: Open) -> None:
    async with page_served(MadeUpCluster(1, 3, 4608)) as url:
        page = await open_page(url)
        await is_live(page)
        await expect(page.locator(".lane-figures")).to_contain_text("step 40 ms")
        for name in ("Forecasts, last hour", "Finish times", "Lengths on arrival", "Load ahead"):
            assert await page.get_by_role("region", name=name).count() == 0
        await expect(page.locator(".figures dt")).to_have_text(
            ["running", "waiting", "KV cache", "decode step"]
        )
    async with page_served(MadeUpCluster(1, 3, 4608, joules=2.5e6)) as url:
        page = await open_page(url)
        await is_live(page)
        await expect(page.locator(".figures dt").last).to_have_text("energy")
        await expect(page.locator(".figures dd").last).to_have_text(re.compile(r"[\d.]+ MJ"))


class Hostile(MadeUpCluster):
    def _name(self, one: object) -> str:
        return "<img src=x onerror=alert(1)>"


async def test_names_are_text_whatever_they_are(open_page: Open) -> None:
    async with page_served(Hostile(1, 3, 4608)) as url:
        page = await open_page(url)
        await is_live(page)
        await page.locator(".lane summary").click()
        await expect(page.locator("tbody th").first).to_have_text("<img src=x onerror=alert(1)>")
        assert await page.locator("main img").count() == 0


async def test_it_finds_a_proxy_again_after_its_restart(open_page: Open) -> None:
    feed = SnapshotFeed(MadeUpCluster(2, 4, 4608, seconds=0.1))
    first = TestServer(page_app(feed))
    await first.start_server()
    port = first.port
    page = await open_page(f"{first.make_url('/ui')}#token={TOKEN}")
    await is_live(page)
    await first.close()
    await expect(page.locator("#status")).to_contain_text("no connection")
    feed = SnapshotFeed(MadeUpCluster(3, 4, 4608, seconds=0.1))
    second = TestServer(page_app(feed), port=port)
    await second.start_server()
    try:
        await is_live(page)
        await expect(page.locator(".lane")).to_have_count(3)
        await updates(page.locator(".lane").first)
    finally:
        await second.close()


async def test_draining_asks_first(open_page: Open, tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        instance = it.proxy.cluster.instances["decode-1"]
        page = await open_page(it.listeners.admin.page_url)
        await is_live(page)
        lane = page.locator(".lane").filter(has_text="decode-1")
        await lane.get_by_role("button").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("Drain decode-1?")
        await page.keyboard.press("Enter")  # the focus is on Cancel
        await expect(dialog).to_be_hidden()
        assert not instance.draining
        await lane.get_by_role("button").click()
        await dialog.get_by_role("button", name="Drain").click()
        await until(lambda: instance.draining)
        await expect(lane.locator(".badge")).to_contain_text("draining")
        await lane.get_by_role("button").click()
        await page.keyboard.press("Escape")
        assert instance.draining
        await lane.get_by_role("button").click()
        await dialog.get_by_role("button", name="Undrain").click()
        await until(lambda: not instance.draining)
        await page.close()


async def test_a_wrong_token_is_asked_for_again(open_page: Open) -> None:
    async with page_served(MadeUpCluster(1, 3, 4608)) as url:
        page = await open_page(url.replace(TOKEN, "another"))
        await expect(page.get_by_label("Token")).to_be_focused()
        await expect(page.locator("#unlock")).to_contain_text("Not accepted")
        await page.get_by_label("Token").fill(url)  # the whole address does as well
        await page.keyboard.press("Enter")
        await is_live(page)
        await page.reload()
        await is_live(page)


async def test_a_hidden_page_asks_for_nothing(open_page: Open) -> None:
    feed = SnapshotFeed(MadeUpCluster(1, 3, 4608, seconds=0.05))
    async with TestServer(page_app(feed)) as server:
        page = await open_page(f"{server.make_url('/ui')}#token={TOKEN}")
        await is_live(page)
        for hidden, watchers in (("true", 0), ("false", 1)):
            await page.evaluate(
                f"""Object.defineProperty(document, "hidden", {{
                      value: {hidden}, configurable: true }});
                    document.dispatchEvent(new Event("visibilitychange"))"""
            )
            await until(lambda watchers=watchers: feed.watchers == watchers)
        await page.close()


async def test_thousands_of_requests_can_be_worked_with(open_page: Open) -> None:
    source = MadeUpCluster(64, 64, 38_000)
    async with page_served(source) as url:
        page = await open_page(url)
        await is_live(page)
        await expect(page.locator(".figures dd").first).to_have_text("4,096")
        await expect(page.locator(".lane")).to_have_count(64)
        await page.locator(".overview button").nth(50).click()
        lane = page.locator(".lane").nth(50)
        await expect(lane).to_be_in_viewport()
        await lane.locator("summary").click()
        await expect(lane.locator("tbody tr").nth(50)).to_be_attached()
        looks = source.looks
        await updates(lane)
        await until(lambda: source.looks > looks + 4)
        await is_live(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_to_complain_of(open_page: Open, scheme: str) -> None:
    async with page_served(MadeUpCluster(8, 6, 1500, seconds=0.1)) as url:
        page = await open_page(url, color_scheme=scheme)
        await is_live(page)
        await expect(page.locator(".moves li.moved").first).to_be_visible()
        await page.locator(".lane summary").first.click()
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
        await page.locator(".lane").first.get_by_role("button").click()
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()


async def test_nothing_moves_by_itself_where_that_is_unwanted(open_page: Open) -> None:
    async with page_served(MadeUpCluster(3, 6, 4608, seconds=0.1)) as url:
        page = await open_page(url, reduced_motion="reduce")
        await is_live(page)
        await expect(page.locator(".arcs path").first).to_be_attached()
        assert await page.evaluate("document.getAnimations().length") == 0


async def test_two_logs_are_replayed_beside_each_other(
    open_page: Open, tmp_path: Path, headway_command: list[str]
) -> None:
    one = MadeUpCluster(2, 4, 4608, seed=1).record(tmp_path / "one.jsonl.gz", 41)
    other = MadeUpCluster(3, 4, 4608, seed=2).record(tmp_path / "other.jsonl.gz", 21)
    command = [*headway_command, "demo", "--replay", str(one), str(other), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        said = [await process.stdout.readline() for _ in range(3)]
        page = await open_page(said[-1].split()[-1].decode())
        await expect(page.locator(".panel h2")).to_contain_text(["one.jsonl.gz", "other.jsonl.gz"])
        await expect(page.locator(".panel").nth(1).locator(".lane")).to_have_count(3)
        assert await page.get_by_role("button", name="Drain").count() == 0
        slider = page.get_by_role("slider", name="Time")
        await expect(page.locator("output")).to_contain_text("of 20 s")
        before = await page.locator("canvas").first.evaluate(DRAWN)
        await slider.focus()
        await page.keyboard.press("End")
        await expect(page.locator("output")).to_have_text("20 s of 20 s")
        async with asyncio.timeout(60):
            while await page.locator("canvas").first.evaluate(DRAWN) == before:
                await asyncio.sleep(0.05)
        await page.get_by_label("Speed").select_option("50")
        await page.get_by_role("button", name="Play").click()
        await expect(page.locator("output")).to_have_text("20 s of 20 s")
        results = await Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
    finally:
        process.terminate()
        assert await process.wait() == 0
