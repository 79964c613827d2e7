"""Errors of the engine below in the words of what a program gives an engine for inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError

_WORDS = (("tensor_parallel.autotp_size", "tensor_parallel.tp_size"), ("initialize()", "init_inference()"))


@contextmanager
def in_words_of_inference() -> Iterator[None]:
    """Have errors inside name tp_size and init_inference().

    Errors: ConfigError
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for word, instead in _WORDS:
            text = text.replace(word, instead)
        if text == str(error):
            raise
        raise type(error)(text) from error
