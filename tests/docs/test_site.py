"""The documents' site builds without a warning, loads nothing from other servers, and works in a browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.browser import Browser, find_browser
from tests.docs.test_api import ENTRIES
from tests.docs.test_links import CHECKOUT

SCREENS = "DSLAUNCH_SCREENS"  # a folder that keeps the pictures
PHONE = (390, 844)  # CSS pixels
DESK = (1400, 1000)
LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
BROWSER = find_browser()

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
        reason="needs mkdocs, mkdocs-material and mkdocstrings: pip install --group docs",
    ),
]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


class Page(HTMLParser):
    """What one page points at, what it loads, and where one can jump to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value for name, value in attrs if value is not None}
        if "id" in known:
            self.anchors.add(known["id"])
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        if tag in LOADING and LOADING[tag] in known:
            self.loaded.append(known[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it, with a warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert BROWSER is not None
    with Browser(BROWSER, tmp_path_factory.mktemp("profile")) as one:
        yield one


def keep(browser: Browser, name: str) -> None:
    if folder := os.environ.get(SCREENS):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder) / f"{name}.png")


def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[Path, Page]) -> None:
    outside = {
        (path.name, target)
        for path, page in pages.items()
        for target in page.loaded
        if urlsplit(target).netloc
    }
    assert outside == set()
    sheets = [(path, path.read_text(encoding="utf-8")) for path in site.rglob("*.css")]
    assert sheets
    assert [path.name for path, text in sheets if re.search(r"url\(['\"]?(https?:)?//|@import", text)] == []


def test_a_reader_chooses_among_seven_heads_at_most(site: Path) -> None:
    assert 5 <= (site / "index.html").read_text(encoding="utf-8").count('class="md-tabs__item') <= 7


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of a site at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append((str(path.relative_to(site)), link))
    assert dead == []


def test_every_public_name_has_an_entry_with_its_docstring(site: Path, pages: dict[Path, Page]) -> None:
    for module, entries in ENTRIES.items():
        path = site / "reference" / "api" / f"{module}.html"
        text = path.read_text(encoding="utf-8")
        for entry in entries:
            if entry.source:
                assert entry.source in pages[path].anchors, f"{module}.{entry.name}"
            else:
                assert f">{entry.name}</code>" in text, f"{module}.{entry.name}"
            first_words = re.match(r"[A-Za-z ,]+", entry.summary)
            assert first_words is None or first_words[0].strip() in " ".join(text.split()), entry.name


def pages_found(browser: Browser, address: str, words: str) -> list[str]:
    """The pages that a search shows, best first, each once."""
    browser.ask(
        "{ const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
        f" field.value = {words!r}; field.dispatchEvent(new Event('keyup'));"
        " field.dispatchEvent(new Event('input')); }"
    )
    links = browser.wait_for(
        "[...document.querySelectorAll('a.md-search-result__link')].map(link => link.href).join(' ')"
    )
    return list(dict.fromkeys(link.partition(".html")[0].removeprefix(address) for link in links.split()))


@needs_browser
def test_the_front_page_has_the_installation_a_program_and_a_picture(browser: Browser, address: str) -> None:
    browser.resize(*DESK)
    browser.open(f"{address}index.html")
    text = browser.ask("document.querySelector('article').innerText")
    assert "pip install '.[train]'" in text
    assert "dslaunch.initialize(" in text
    assert "dslaunch --num_gpus 2 train.py" in text
    assert browser.ask("[...document.querySelectorAll('article img')].every(one => one.naturalWidth > 0)")


QUESTIONS = {  # what a newcomer types, and the pages of which one must be among the first three
    "install": "index start/first-job",
    "uninstall": "FAQ",
    "resume on another number of GPUs": "train/checkpoints train/data-and-resuming",
    "migrate from DeepSpeed": "start/from-deepspeed",
    "13B 24GB": "train/13b-and-larger",
    "notebook": "FAQ",
    "out of memory": "train/out-of-memory",
    "sbatch script": "launch/slurm",
    "which ZeRO stage": "train/choose-a-stage train/zero",
    "no shared file system": "launch/files",
    "job hangs": "launch/failures",
    "NCCL timeout": "launch/network",
    "save weights for Hugging Face": "libraries/hugging-face train/checkpoints",
    "gradient accumulation": "train/engine train/config",
    "torchrun": "start/from-fsdp-and-torchrun",
    "docker": "start/containers",
    "why is training slow": "train/why-slow",
    "wandb": "train/monitors",
    "ssh port": "start/cluster launch/hostfile",
    "stop a job": "launch/operating",
    "long context": "train/sequence-parallel",
    "offload to NVMe": "train/offload",
    "mpirun": "launch/mpi-and-pdsh",
}


@needs_browser
@pytest.mark.parametrize("words", QUESTIONS)
def test_search_answers_a_question_among_the_first_three_pages(
    browser: Browser, address: str, words: str
) -> None:
    browser.resize(*DESK)
    browser.open(f"{address}index.html?{words.replace(' ', '+')}")
    found = pages_found(browser, address, words)
    assert set(QUESTIONS[words].split()) & set(found[:3]), found


@needs_browser
def test_search_finds_a_key_and_leads_to_it(browser: Browser, address: str) -> None:
    browser.resize(*DESK)
    browser.open(f"{address}index.html")
    keep(browser, "index")
    assert "The first job on one machine" in browser.ask("document.querySelector('article').innerText")
    found = pages_found(browser, address, "zero_hpz_partition_size")
    keep(browser, "search")
    assert {"train/config", "train/zero"} & set(found), found
    assert not found[0].startswith("design/"), found
    browser.ask("document.querySelector('a.md-search-result__link').click()")
    assert browser.wait_for(
        "document.querySelector('article')?.innerText.includes('zero_hpz_partition_size')"
    )


@needs_browser
def test_navigation_leads_from_the_index_to_a_page(browser: Browser, address: str) -> None:
    browser.resize(*DESK)
    browser.open(f"{address}index.html")
    tabs = browser.ask(
        "[...document.querySelectorAll('.md-tabs__link')].map(tab => tab.innerText.trim()).join('|')"
    )
    assert {"Start", "Launch", "Train", "Look up"} <= set(tabs.split("|"))
    links = "[...document.querySelectorAll('.md-tabs__link')]"
    browser.ask(f"{links}.find(tab => tab.innerText.trim() == 'Train').click()")
    browser.wait_for("location.pathname.includes('/train/') && document.readyState === 'complete'")
    browser.ask(
        "[...document.querySelectorAll('.md-nav__link')].find(one => one.href?.endsWith('zero.html')).click()"
    )
    assert browser.wait_for("document.querySelector('h1')?.innerText.startsWith('ZeRO in one page')")
    keep(browser, "zero")
    browser.open(f"{address}reference/api/dslaunch.html")
    keep(browser, "api")


@needs_browser
@pytest.mark.parametrize("page", ["index", "start/first-job", "train/zero", "reference/api/dslaunch", "FAQ"])
def test_a_page_is_no_wider_than_a_phone(browser: Browser, address: str, page: str) -> None:
    browser.resize(*PHONE, is_phone=True)
    browser.open(f"{address}{page}.html")
    keep(browser, f"phone-{page.replace('/', '-')}")
    assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]


@needs_browser
def test_the_browser_asked_no_other_server(browser: Browser, address: str) -> None:
    browser.open(f"{address}train/config.html")
    assert browser.requested
    assert [
        one for one in browser.requested if not one.startswith((address, "data:", "about:", "blob:"))
    ] == []
