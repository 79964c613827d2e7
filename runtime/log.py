"""The logger of dslaunch, and what programs say by it on some ranks.

Its level is WARNING, as Python's logging has it, unless the program sets another one or the variable
DSLAUNCH_LOG_LEVEL does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .errors import ConfigError

_ALL_RANKS = -1
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

logger = logging.getLogger("dslaunch")
LEVEL_VARIABLE = "DSLAUNCH_LOG_LEVEL"


@cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Log a warning, the same one only once in this process."""
    logger.warning(*args, **kwargs, stacklevel=2)


def get_dist_msg(message: object, ranks: Sequence[int] | None = None) -> str | None:
    """Return the message with this rank's number before it, or None if this rank is not among `ranks`.

    [-1] means all ranks, and nothing or [] none. Without a process group there is one process,
    which has number -1.
    """
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    if not ranks or not (ranks[0] == _ALL_RANKS or dist.get_rank() in ranks):
        return None
    return f"[Rank {dist.get_rank()}] {message}"


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log the message on these ranks; see `get_dist_msg`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, "%s", text, stacklevel=2)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, the same message only once in this process."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message: object, ranks: Sequence[int] | None = None) -> None:
    """Print the message on these ranks, at any level; see `get_dist_msg`."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text, flush=True)


def print_json_dist(
    message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | os.PathLike[str] | None = None
) -> None:
    """Write the message and this rank's number as `rank` into a file, on these ranks; see `get_dist_msg`.

    Errors: ConfigError without a path
    """
    if path is None:
        raise ConfigError("print_json_dist(path=None): give the file to write")
    if get_dist_msg("", ranks) is not None:
        rank = dist.get_rank() if dist.is_initialized() else -1
        Path(path).write_text(json.dumps({**message, "rank": rank}))


def print_configuration(args: object, name: str) -> None:
    """Log all attributes of an object, as of parsed arguments, at level info."""
    logger.info("%s:", name)
    for key, value in sorted(vars(args).items()):
        logger.info("  %s %s", key.ljust(30, "."), value)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level, such as 20 of info.

    Errors: ValueError for other words
    """
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"log level {log_level_str!r}: must be one of {', '.join(_LEVELS)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Have everything from this level on shown, by handlers that are there or else on stderr.

    Errors: ValueError for a word that is no level
    """
    level = get_log_level_from_string(log_level_str)
    target = logger if custom_logger is None else custom_logger
    target.setLevel(level)
    if not target.hasHandlers():  # logging's last resort shows warnings only
        shown = logging.StreamHandler()
        shown.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s")
        )
        target.addHandler(shown)
    for handler in target.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the level from which on messages are shown."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether messages of this level are shown.

    Errors: ValueError for a word that is no level
    """
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def call_to_str(base: str, *args: object, **kwargs: object) -> str:
    """Return the text of a call: "load(1, tag='a')"."""
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(words)})"


@cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def _follow_environment() -> None:
    word = os.environ.get(LEVEL_VARIABLE)
    if not word:
        return
    try:
        set_log_level_from_string(word)
    except ValueError:
        logger.warning(
            "%s=%r: must be one of %s; it counts as warning", LEVEL_VARIABLE, word, ", ".join(_LEVELS)
        )


_follow_environment()

# Programs call them as the logger's own.
logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]
