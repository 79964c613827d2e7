"""The pictures of docs/launch/report.md: python -m tests.docs.report_pictures"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from PIL import Image

from dslaunch.launcher.page.page import page_of
from dslaunch.launcher.page.read_run import read_run, source_in
from tests.docs.browser import Browser, find_browser
from tests.launcher.made_events import Made, write_events

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "launch"
SIZE = (1100, 1150)  # CSS pixels
COLORS = 128  # enough for text and charts, and a third of the bytes
DRAWN_S = 5.0  # for the last chart


def main() -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = Made(duration_s=1000.0, fails_at=(500.0,), straggler=5, exit_code=0)
        write_events(folder / "events.jsonl", made)
        (folder / "page.html").write_text(page_of(read_run(source_in(folder))))
        with Browser(program, folder / "profile") as browser:
            browser.resize(*SIZE)
            for theme in ("light", "dark"):
                features = [{"name": "prefers-color-scheme", "value": theme}]
                browser.call("Emulation.setEmulatedMedia", features=features)
                browser.open((folder / "page.html").as_uri())
                browser.wait_for(f"document.documentElement.dataset.painted === '{theme}'")
                time.sleep(DRAWN_S)
                path = FOLDER / f"report-{theme}.png"
                browser.screenshot(path)
                Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=COLORS).save(
                    path, optimize=True
                )
                browser.call("Page.navigate", url="about:blank")


if __name__ == "__main__":
    main()
