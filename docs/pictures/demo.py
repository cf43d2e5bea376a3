"""Photographs the demo page after one click in a browser: `python docs/pictures/demo.py`.

Needs playwright, and a Chromium of the system.
"""

import shutil
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from hf_ebm.assets import load_embedded
from hf_ebm.demo import build_demo

page = build_demo(*load_embedded())
_, address, _ = page.launch(prevent_thread_lock=True, share=False, ssr_mode=False, quiet=True)
with sync_playwright() as playwright:
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    browser = playwright.chromium.launch(executable_path=next(filter(None, map(shutil.which, names))))
    window = browser.new_page(viewport={"width": 1280, "height": 940})
    window.goto(f"{address}?__theme=light")
    window.get_by_role("button", name="Run", exact=True).click()
    expect(window.locator("#sample-status")).to_contain_text("done", timeout=60_000)
    expect(window.locator("#sample-curve svg")).to_be_visible()
    window.wait_for_timeout(2000)  # the curves are drawn, and the button is as it was
    window.screenshot(path=Path(__file__).with_suffix(".png"))
    browser.close()
page.close()
