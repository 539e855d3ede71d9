"""Weigh the dashboard's page: what a browser asks for, and how long it takes to draw 8,000 cards.

It is served with made-up worlds to a headless Chromium. Compressed sizes are gzip's, which a proxy may apply.
"""

import asyncio
import gzip
import statistics
import sys
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from playwright.async_api import Browser, Request, async_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.page.server import PAGE, TOKEN, WORLDS, PageServer

CHROMIUM = "/usr/bin/chromium"
GOAL_KB = 150
GOAL_DRAWN_S = 2.0
RUNS = 5

DRAWN = """() => {
    const canvas = document.querySelector("canvas");
    return canvas && canvas.height > 1000 && performance.now();
}"""
"""The milliseconds since the page was asked for, once the canvas has its size, in which it is drawn."""


async def start(world: str) -> tuple[web.AppRunner, str]:
    """Serve a world. Return the server and its address with the token."""
    runner = web.AppRunner(PageServer(WORLDS[world]).app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/#token={TOKEN}"


async def files(browser: Browser, world: str, screen: str) -> list[str]:
    """Return the paths of the page's files that a screen asks for, with those of its charts."""
    runner, url = await start(world)
    page = await browser.new_page()
    paths: list[str] = []

    def note(request: Request) -> None:
        path = urlsplit(request.url).path
        if not path.startswith("/api/"):
            paths.append(path.lstrip("/") or "index.html")

    page.on("request", note)
    await page.goto(url)
    await page.get_by_role("heading", level=1).wait_for()
    await page.evaluate("screen => { location.hash = `#/${screen}`; }", screen)
    if screen != "cards":
        await page.get_by_role("figure").first.wait_for()
    await page.close()
    await runner.cleanup()
    # The browser may ask for its icon again.
    return [*dict.fromkeys(paths)]


async def drawn(browser: Browser) -> float:
    """Return the seconds from opening the page of 1,000 nodes until its cards are drawn."""
    runner, url = await start("thousand")
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    await page.goto(url)
    handle = await page.wait_for_function(DRAWN, polling="raf")
    milliseconds = float(await handle.json_value())
    await page.close()
    await runner.cleanup()
    return milliseconds / 1000


def weight(paths: list[str]) -> tuple[float, float]:
    """Return the kB of files, and the kB that gzip makes of them."""
    contents = [(PAGE / path).read_bytes() for path in paths]
    packed = [gzip.compress(data, 9) for data in contents]
    return sum(map(len, contents)) / 1000, sum(map(len, packed)) / 1000


async def measure() -> int:
    """Print a Markdown table. Return 1 if a goal is missed."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        first = await files(browser, "workstation", "cards")
        charts = await files(browser, "workstation", "program/job-0")
        times = [await drawn(browser) for _ in range(RUNS)]
        await browser.close()
    print("| the page | requests | kB | kB by gzip |\n|---|---|---|---|")
    print(f"| start page | {len(first)} | {weight(first)[0]:.0f} | {weight(first)[1]:.0f} |")
    print(f"| with charts | {len(charts)} | {weight(charts)[0]:.0f} | {weight(charts)[1]:.0f} |")
    median = statistics.median(times)
    print(f"\n8,000 cards drawn after {median:.2f} s (median of {RUNS}), goal {GOAL_DRAWN_S:.0f} s")
    return int(weight(first)[0] > GOAL_KB or median > GOAL_DRAWN_S)


sys.exit(asyncio.run(measure()))
