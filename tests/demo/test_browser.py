"""The page in a real browser, served by the command: it works, logs no errors, and asks nothing of other machines.

Needs a Chromium of the system (`apt-get install chromium-headless-shell`); skipped where there is none.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from playwright.sync_api import expect, sync_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]

# The command, with every connection and look-up of a name that isn't this machine's written to a file.
SERVED = """
import sys

def note(event, arguments):
    host = None
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    elif event == "socket.getaddrinfo":
        host = arguments[0]
    if host not in (None, "", "127.0.0.1", "localhost", "::1", "0.0.0.0"):
        with open(sys.argv[1], "a") as file:
            print(event, host, file=file)

sys.addaudithook(note)
from hf_ebm.cli.main import main
main(["demo", *sys.argv[2:]])
"""
PROMPT = "and the ___ ___ unto the ___ of israel."


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Address of the page; at the end its log and what it asked of other machines must be empty."""
    folder = tmp_path_factory.mktemp("served")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    arguments = [sys.executable, "-c", SERVED, str(folder / "asked"), "--port", str(port)]
    # The tests' own switch would hide what the command asks of the Hub.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env={**environment, "OMP_NUM_THREADS": "1"})
    try:
        for _ in range(240):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(address, timeout=10).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert not (folder / "asked").exists(), (folder / "asked").read_text()
    assert "Traceback" not in (folder / "log").read_text()
    assert "gradio.live" not in (folder / "log").read_text()


@pytest.fixture(scope="module")
def browser():
    """One for all tests, with its cache: reading the page's scripts takes longer than what is tested."""
    with sync_playwright() as playwright:
        # It finds no other machine, so what the page asks of one fails; routing requests would turn the cache off.
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser.new_context(viewport={"width": 1280, "height": 1000})
        browser.close()


@pytest.fixture
def page(served, browser):
    """The page, opened; at the end there must have been no error and no request to anywhere else."""
    page = browser.new_page()
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    problems = []

    def asked(request):
        if not request.url.startswith((served, "data:", "blob:")):
            problems.append(f"request to {request.url}")

    page.on("request", asked)
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(served)
    yield page
    page.close()
    assert not problems


def tab(page, name: str):
    """The tab of a name, opened."""
    page.get_by_role("tab", name=name).click()
    return page.get_by_role("tabpanel").filter(visible=True)


def type_into(panel, label: str, text: str) -> None:
    panel.get_by_label(label).fill(text)


def empty(panel, label: str) -> None:
    """Empties a field once what is there from the start has come; where it comes again, again."""
    field = panel.get_by_label(label)
    expect(field).not_to_have_value("")
    while field.input_value():
        field.fill("")
        panel.page.wait_for_timeout(500)


def test_one_click_shows_chains_at_work(page, tmp_path):
    panel = tab(page, "Sample")
    expect(panel.get_by_label("Text with blanks")).to_have_value(PROMPT)  # there from the start
    panel.get_by_role("button", name="Run").click()
    chains, status, curve = (page.locator(f"#sample-{name}") for name in ("chain", "status", "curve"))
    expect(status).to_contain_text("running: epoch")  # seen while it runs
    expect(status).to_contain_text("done: epoch 20 of 20")
    expect(status).to_contain_text(
        re.compile(r"mean energy \d+\.\d\d nats · acceptance rate 0\.\d\d · novel rate 0\.\d\d · split R-hat \d\.\d\d")
    )
    text = re.sub(r"\s+", " ", chains.inner_text())
    for number in range(1, 5):
        assert re.search(rf"{number}\. and the [a-z]+ [a-z]+ unto the [a-z]+ of israel ?\.", text), text
    assert "just changed free" in text  # the legend
    expect(curve.locator("svg .mark-line path[d*=L]")).to_have_count(4)
    points = curve.locator("svg .mark-line path").first.get_attribute("d").count("L")
    assert points == 20  # twenty epochs after the start
    page.screenshot(path=tmp_path / "sample.png", full_page=True)
    assert (tmp_path / "sample.png").stat().st_size > 20_000
    type_into(panel, "Chains", "1")
    page.get_by_role("button", name="blessed are the").click()
    expect(panel.get_by_label("Text with blanks")).to_have_value(re.compile("^blessed"))
    panel.get_by_role("button", name="Run").click()
    expect(chains).to_contain_text("blessed")
    expect(status).to_contain_text(re.compile(r"done: epoch 20 of 20 · energy"))
    expect(curve.locator("svg .mark-line path[d*=L]")).to_have_count(1)


def test_a_run_is_stopped_and_the_next_one_starts(page):
    panel = tab(page, "Sample")
    empty(panel, "Text with blanks")
    type_into(panel, "Length", "12")
    type_into(panel, "Epochs", "200")
    panel.get_by_role("button", name="Run").click()
    status = page.locator("#sample-status")
    expect(status).to_contain_text(re.compile("running: epoch [1-9]"))
    panel.get_by_role("button", name="Stop").click()
    expect(status).to_contain_text(re.compile(r"stopped: epoch \d+ of 200.*acceptance rate"))
    panel.get_by_role("combobox", name="Kernel").click()
    page.get_by_role("option", name="mask_predict").click()
    expect(panel.get_by_label("Temperature")).to_be_disabled()
    expect(panel.get_by_label("Temperature")).to_have_css("opacity", "0.4")
    expect(panel.get_by_label("Epochs")).to_have_css("opacity", "1")
    type_into(panel, "Epochs", "4")
    panel.get_by_role("button", name="Run").click()
    expect(status).to_contain_text("decoded in 4 iterations")


def test_kernels_are_compared(page, tmp_path):
    panel = tab(page, "Compare kernels")
    expect(panel.get_by_label("Text with blanks")).to_have_value(PROMPT)
    for epochs in ("4", "6"):  # once more: the plot is made anew
        type_into(panel, "Epochs", epochs)
        panel.get_by_role("button", name="Compare").click()
        expect(page.locator("#compare-status")).to_contain_text("running")
        expect(page.locator("#compare-status")).to_contain_text("done")
        table = page.locator("#compare-table")
        for kernel in ("metropolis_hastings", "gibbs", "mask_predict"):
            expect(table).to_contain_text(kernel)
        expect(page.locator("#compare-curves svg .mark-line path")).to_have_count(3)
        first = page.locator("#compare-curves svg .mark-line path").first
        assert first.get_attribute("d").count("L") == int(epochs)
    page.screenshot(path=tmp_path / "compare.png", full_page=True)


def test_lines_are_scored_and_reranked(page, tmp_path):
    panel = tab(page, "Score and rerank")
    panel.get_by_role("button", name="Score").click()  # the lines that are there
    expect(page.locator("#score-status")).to_contain_text("2 lines scored")
    lines = ["and light god said there be let", "and god said, let there be light", "amen ☃"]
    type_into(panel, "Texts, one a line", "\n".join(lines))
    panel.get_by_role("button", name="Score").click()
    expect(page.locator("#score-status")).to_contain_text("3 lines scored")
    expect(page.get_by_text("The model has no token for '☃'")).to_be_visible()
    cells = page.locator("#score-table [data-testid^=cell]")
    expect(cells).to_have_count(18)  # three rows of six columns
    shown = cells.all_inner_texts()
    energies = dict(zip(shown[1::6], map(float, shown[2::6]), strict=True))
    assert set(energies) == set(lines) and energies[lines[1]] < energies[lines[0]]
    assert list(energies.values()) == sorted(energies.values())
    tokens = page.locator("#score-tokens")
    expect(tokens).to_contain_text("above 6")
    panel.get_by_label("Tokens of").click()
    page.get_by_role("option", name=re.compile(re.escape(lines[0]))).click()
    expect(tokens).to_contain_text(re.compile(r"light\s+god"))
    panel.get_by_label("energy per token").click()
    expect(tokens).not_to_contain_text(re.compile(r"light\s+god"))  # the best is shown again
    page.screenshot(path=tmp_path / "score.png", full_page=True)


def test_fills_and_variants_are_tables(page, tmp_path):
    panel = tab(page, "Fill together")
    panel.get_by_role("button", name="Fill", exact=True).click()
    expect(page.locator("#fill-status")).to_contain_text("probabilities are exact")
    expect(page.locator("#fill-table")).to_contain_text("judah · judah")
    expect(page.locator("#fill-marginals td")).to_have_count(8)
    panel.get_by_label("each by itself").click()
    expect(panel.get_by_label("Temperature")).to_be_disabled()
    panel = tab(page, "Variants")
    panel.get_by_role("button", name="Score variants").click()
    expect(page.locator("#variants-map td")).to_have_count(26 * 5)
    cell = page.locator("#variants-map td").filter(has_text=re.compile("^10$"))
    expect(cell).to_have_css("background-color", re.compile(r"rgba\(37, 99, 235"))
    expect(page.locator("#variants-table")).to_contain_text("l1o")
    page.screenshot(path=tmp_path / "variants.png", full_page=True)


@pytest.mark.parametrize(
    "text,fields,message",
    [
        ("", {}, "there is nothing to sample"),
        ("and the king", {}, "text has no blanks"),
        ("the ___ " + "amen " * 300, {}, "text is too long"),
        ("the ___", {"Length": "3"}, "both given"),
        ("", {"Length": "-3"}, "length must be a whole number from 1 to 126, got -3"),
        ("the ___", {"Epochs": "1000000"}, "epochs must be a whole number from 1 to 200"),
        ("the ___", {"Block size": "2"}, "block size must be a whole number from 1 to 1"),
        ("the ___", {"Temperature": "0"}, "temperature must be a number from 0.01 to 100, got 0"),
        ("the ___", {"Seed": "1.5"}, "seed must be a whole number from 0"),
    ],
)
def test_mistakes_on_the_tab_that_samples(page, text, fields, message):
    panel = tab(page, "Sample")
    type_into(panel, "Text with blanks", text)
    for label, value in fields.items():
        type_into(panel, label, value)
    panel.get_by_role("button", name="Run").click()
    expect(page.get_by_test_id("toast-body")).to_contain_text(message)


def test_mistakes_on_the_other_tabs(page, tmp_path):
    panel = tab(page, "Compare kernels")
    empty(panel, "Text with blanks")
    panel.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("there is nothing to sample")).to_be_visible()
    panel = tab(page, "Score and rerank")
    empty(panel, "Texts, one a line")
    panel.get_by_role("button", name="Score").click()
    expect(page.get_by_text("there is nothing to score")).to_be_visible()
    type_into(panel, "Texts, one a line", "amen\n" * 40)
    panel.get_by_role("button", name="Score").click()
    expect(page.get_by_text("40 lines were given; this page scores at most 32 at once")).to_be_visible()
    page.screenshot(path=tmp_path / "mistakes.png", full_page=True)
