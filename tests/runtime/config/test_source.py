"""Where a config may come from, and what happens where it cannot be read."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from dslaunch.runtime.config import load_config
from dslaunch.runtime.config.source import read_source
from dslaunch.runtime.errors import ConfigError

TEXT = '{"train_batch_size": 8, "bf16": {"enabled": true}}'
VALUES = {"train_batch_size": 8, "bf16": {"enabled": True}}

WITH_COMMENTS = """\
// a comment
{
  # another
  "train_batch_size": 8, /* and
  another */
  bf16: {"enabled": true,},
}
"""


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        WITH_COMMENTS,
        "train_batch_size: 8\nbf16: {enabled: true}",
        TEXT.replace("8", "8.0"),
        "\ufeff" + TEXT,
        f"\n\n{TEXT}\n",
    ],
)
def test_a_file_is_json_or_hjson(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert read_source(path) == (path, VALUES)
    assert read_source(Path(path)) == (path, VALUES)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_text_that_is_no_path_is_base64(encode: Callable[[bytes], bytes]) -> None:
    encoded = encode(TEXT.replace("8", "8 // ~~~???>>>\n").encode()).decode()
    assert set(encoded) & set("+/-_"), "both alphabets must differ here"
    assert read_source(encoded) == ("ds_config (base64)", VALUES)


def test_a_mapping_is_copied_and_stays_as_it_was() -> None:
    betas = (0.9, 0.95)
    given: dict[str, Any] = {"optimizer": MappingProxyType({"type": "Adam", "params": {"betas": betas}})}
    name, values = read_source(given)
    assert (name, values) == ("ds_config", {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95]}}})
    load_config({**given, "train_batch_size": 8, "zero_optimization": True}, world_size=1)
    assert given == {"optimizer": {"type": "Adam", "params": {"betas": betas}}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "PATH: a: given more than once; keep one"),
        ('{"zero": {"b": [{"c": 1, "c": 1}], "d": 1, "d": 2}}', "PATH: zero.b[0].c, zero.d: given more than once; keep one"),
        ("[1, 2]", "PATH: a config must be one object: { ... }"),
        ("just words", "PATH: a config must be one object: { ... }"),
        ('{"a": [1, 2}', "PATH:1: Found a punctuator character when expecting a quoteless string (check your syntax); the file must be one JSON object"),
        (b"\xff\xfe\x00", "PATH: not a text in UTF-8 (byte 0)"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_source(path)
    assert str(caught.value) == message.replace("PATH", path)


def test_lists_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too deep inside each other"):
        read_source(write(tmp_path, '{"a":' + "[" * 20_000))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="too deep inside each other"):
        read_source({"a": endless})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.json", "absent.json: no such file; give the path of a ds_config, a dict, or base64 of a JSON object"),
        ("bm8gY29uZmln", "bm8gY29uZmln: no such file; give the path of a ds_config, a dict, or base64 of a JSON object"),
        (Path("absent.json"), "absent.json: cannot be read: No such file or directory"),
        ("/", "/: cannot be read: Is a directory"),
        (7, "a config of type int: must be a path, a dict, or a base64 text"),
        (None, "a config of type NoneType: must be a path, a dict, or a base64 text"),
        ({"bf16": {3: 4}}, "ds_config: the key 3 is not a text"),
        ({"a": [{None: 4}]}, "ds_config: the key None is not a text"),
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_source(source)
    assert str(caught.value) == message
