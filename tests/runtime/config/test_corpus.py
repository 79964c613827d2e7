"""Configs of the shapes people use.

Beside each x.json or x.yaml stands x.txt: all that loading it on 8 ranks gives.

`python tests/runtime/config/test_corpus.py` writes the x.txt anew; the difference is the review.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dslaunch.runtime.config import load_config
from dslaunch.runtime.errors import ConfigError

FOLDER = Path(__file__).parent / "corpus"
CORPUS = sorted(path for path in FOLDER.iterdir() if path.suffix != ".txt")


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the runtime logs in the block, as "info: ..." and "warning: ..."."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname.lower()}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("dslaunch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def outcome(path: Path, *, is_lenient: bool = False) -> str:
    """What is logged, and the configuration in effect or the message;
    with the file's name alone for its path.
    """
    with logged() as lines:
        try:
            lines.append(
                json.dumps(load_config(path, world_size=8, is_lenient=is_lenient).describe(), indent=2)
            )
        except ConfigError as error:
            lines.append(str(error))
    return "\n".join(lines).replace(str(path), path.name) + "\n"


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_config_gives_what_is_written_beside_it(path: Path) -> None:
    assert outcome(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) >= 50
    assert {path.stem for path in FOLDER.glob("*.txt")} == {path.stem for path in CORPUS}


if __name__ == "__main__":
    for config in CORPUS:
        config.with_suffix(".txt").write_text(outcome(config), encoding="utf-8")
