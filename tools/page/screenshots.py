"""Takes the pictures of the dashboard for docs/images: `make screenshots`.

    python -m tools.page.screenshots [NAME…]

The worlds are made up, and their time stands still, so that pictures differ only where the page does.
"""

import asyncio
import base64
import sys
from dataclasses import dataclass
from typing import Literal

from aiohttp import web
from playwright.async_api import Browser, async_playwright

from tools.page.server import PAGE, TOKEN, WORLDS, PageServer

IMAGES = PAGE.parents[2] / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
MAX_BYTES = 150 << 10
NOW = 1_795_788_131.0
"""Friday, 27 November 2026, 14:02:11 UTC."""

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")

TO_WEBP = """async (png) => {
    const image = new Image();
    image.src = `data:image/png;base64,${png}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = image.width;
    canvas.height = image.height;
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/webp", 0.8).split(",")[1];
}"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A screen as the documentation shows it.

    Attributes:
        height: The most that is shown of it, in pixels.
        click: The name of a button to press first.
    """

    name: str
    world: str
    screen: str
    width: int = 1200
    height: int = 900
    click: str = ""


PICTURES = (
    Picture("workstation", "workstation", "cards"),
    Picture("phone", "workstation", "cards", width=390, height=1200),
    Picture("program", "workstation", "program/job-1"),
    Picture("card", "workstation", "card/0", height=1000),
    Picture("idle", "workstation", "idle"),
    Picture("people", "cluster", "people"),
    Picture("what-if", "cluster", "what-if", click="Add"),
    Picture("cluster", "cluster", "cards", height=1050),
    Picture("queue", "cluster", "queue"),
    Picture("workloads", "cluster", "workloads"),
    Picture("nodes", "cluster", "nodes"),
    Picture("thousand-nodes", "thousand", "nodes", height=850),
    Picture("empty", "empty", "cards"),
)


async def take(browser: Browser, picture: Picture, scheme: Scheme) -> bytes:
    """Return a picture as WebP, no taller than what is on the screen."""
    runner = web.AppRunner(
        PageServer(WORLDS[picture.world], lambda: NOW).app(), shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    context = await browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=scheme,
        reduced_motion="reduce",
        locale="en-GB",
        timezone_id="UTC",
    )
    try:
        page = await context.new_page()
        await page.clock.set_fixed_time(NOW * 1000)
        await page.goto(f"http://127.0.0.1:{runner.addresses[0][1]}/#token={TOKEN}")
        await page.get_by_role("heading", level=1).wait_for()
        await page.evaluate("screen => { location.hash = `#/${screen}`; }", picture.screen)
        await page.locator("main > *").first.wait_for()
        if picture.click:
            await page.get_by_role("button", name=picture.click, exact=True).click()
            await page.get_by_role("region", name="Answer").wait_for()
        if "history" in await page.content():
            await page.get_by_role("figure").first.wait_for()
        bottom = await page.evaluate(
            "document.querySelector('footer').getBoundingClientRect().bottom"
        )
        height = min(picture.height, int(bottom))
        png = await page.screenshot(clip={"x": 0, "y": 0, "width": picture.width, "height": height})
        blank = await context.new_page()
        return base64.b64decode(await blank.evaluate(TO_WEBP, base64.b64encode(png).decode()))
    finally:
        await context.close()
        await runner.cleanup()


async def main(names: list[str]) -> int:
    """Write the pictures, light and dark. Return 1 if one is too large."""
    too_large = []
    IMAGES.mkdir(exist_ok=True)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for picture in PICTURES:
            if names and picture.name not in names:
                continue
            for scheme in SCHEMES:
                data = await take(browser, picture, scheme)
                file = IMAGES / f"dashboard-{picture.name}-{scheme}.webp"
                file.write_bytes(data)
                print(f"{file.name}: {len(data) / 1024:.0f} kB")
                if len(data) > MAX_BYTES:
                    too_large.append(file.name)
        await browser.close()
    if too_large:
        print(f"larger than {MAX_BYTES >> 10} kB: {', '.join(too_large)}", file=sys.stderr)
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
