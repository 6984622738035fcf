"""The site and the reports in a headless Chromium: contrast, keyboard, width, console. `tox -e browser` runs it."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: no page is opened")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: no page is opened")

ROOT = Path(__file__).resolve().parents[2]
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 375)]
ALONE = "--no-first-run --disable-background-networking --disable-component-update --disable-sync --disable-quic --no-sandbox"
REPORTS = {
    "run": "run torch-fsdp1 --check full_state_dict.extra_state --check clipping.norm_2 --explain 20",
    "known": "run torch-fsdp2 --check clipping.* --expected-failures shipped --explain 0",
    "train": "train --world-sizes 1,2 --steps 3 {script}",
    "certify": "certify torch-fsdp1 --sample 30",
    "parity": "parity torch-fsdp1 torch-fsdp2 --model mlp",
}
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())
for step in range(3):
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))[dist.get_rank() :: dist.get_world_size()]
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()
"""
# What the keyboard reaches, in its order, and whether a reader sees where it is.
FOCUSED = """() => {
    const style = getComputedStyle(document.activeElement);
    const seen = style.outlineStyle !== "none" || style.boxShadow !== "none";
    return [document.activeElement === document.body, seen, document.activeElement.outerHTML.slice(0, 120)];
}"""


def site_pages() -> list[str]:
    def named(entries: list[dict[str, Any]]) -> Iterator[str]:
        for entry in entries:
            if "file" in entry:
                yield f"site/{entry['file']}.html"
            yield from named(entry.get("entries", []))

    toc = yaml.safe_load((ROOT / "docs" / "site" / "toc.yml").read_text(encoding="utf-8"))
    return [f"site/{toc['root']}.html", *(page for group in toc["subtrees"] for page in named(group["entries"]))]


PAGES = [*(f"{name}/index.html" for name in REPORTS), *site_pages()]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, and a report of each kind; a report's command may end with any verdict."""
    made = tmp_path_factory.mktemp("pages")
    script = made / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    for name, words in REPORTS.items():
        command, *rest = words.format(script=script).split()
        subprocess.run(
            [sys.executable, "-m", "fsdp_testing.cli", command, "--html", str(made / name), *rest],
            cwd=ROOT,
            check=False,
        )
        assert (made / name / "index.html").is_file(), words
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-E", "-c", "docs/site", "-d", str(made / "doctrees")]
    subprocess.run([*build, ".", str(made / "site")], cwd=ROOT, check=True)
    return made


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="session")
def address(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # Where the machine has none, Playwright starts its own, or says how to install it.
        own = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
        browser = playwright.chromium.launch(executable_path=own, args=ALONE.split())
        yield browser
        browser.close()


def tell(wrong: list[str], said: Any) -> None:
    if getattr(said, "type", "error") == "error":
        wrong.append(str(getattr(said, "text", said)))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_well_in_light_and_dark_on_a_screen_and_on_a_phone(chromium: Any, address: str, page: str) -> None:
    wrong: list[str] = []
    for scheme, width in VIEWS:
        with chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme) as context:
            tab = context.new_page()
            tab.on("console", partial(tell, wrong))
            tab.on("pageerror", partial(tell, wrong))
            tab.goto(f"{address}/{page}", wait_until="load")
            needs = tab.evaluate("document.documentElement.scrollWidth")
            if needs > width:
                wrong.append(f"{scheme}, {width} px: scrolls sideways, {needs} px wide")
            for rule in axe.Axe().run(tab).response["violations"]:
                if rule["impact"] in ("serious", "critical"):
                    wrong += [f"{scheme}, {width} px: {rule['id']}: {node['html'][:200]}" for node in rule["nodes"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [*(f"{name}/index.html" for name in REPORTS), "site/README.html"])
def test_the_keyboard_reaches_everything_and_shows_where_it_is(chromium: Any, address: str, page: str) -> None:
    with chromium.new_context(viewport={"width": 1280, "height": 900}) as context:
        tab = context.new_page()
        tab.goto(f"{address}/{page}", wait_until="load")
        reached = []
        for _ in range(60):
            tab.keyboard.press("Tab")
            at_the_end, seen, element = tab.evaluate(FOCUSED)
            if at_the_end:
                break
            assert seen, f"has the focus, and looks as before: {element}"
            reached.append(element)
        assert reached, "Tab reaches nothing"
        folded = tab.locator("details:not([open]) > summary").first
        if folded.count():
            folded.focus()
            opened = folded.element_handle()
            tab.keyboard.press("Enter")
            assert opened.evaluate("summary => summary.parentElement.open")
