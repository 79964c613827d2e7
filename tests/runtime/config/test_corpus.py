"""Configs of the shapes people use. Beside each x.json stands x.txt: all that loading it on 8 ranks gives.

`python tests/runtime/config/test_corpus.py` writes the x.txt anew; the difference is the review.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dslaunch.runtime.config import load_config
from dslaunch.runtime.errors import ConfigError

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))


def outcome(path: Path) -> str:
    """The configuration in effect, or the message, with the file's name alone for its path."""
    try:
        found = json.dumps(load_config(path, world_size=8).describe(), indent=2)
    except ConfigError as error:
        found = str(error)
    return found.replace(str(path), path.name) + "\n"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_config_gives_what_is_written_beside_it(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = outcome(path)
    warnings = "".join(f"warning: {line.replace(str(path), path.name)}\n" for line in caplog.messages)
    assert warnings + found == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) >= 25


if __name__ == "__main__":
    for file in CORPUS:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("dslaunch").addHandler(handler)
        text = outcome(file)
        logging.getLogger("dslaunch").removeHandler(handler)
        file.with_suffix(".txt").write_text(
            "".join(f"warning: {line.replace(str(file), file.name)}\n" for line in lines) + text,
            encoding="utf-8",
        )
