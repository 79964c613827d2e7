"""Where a config may come from, and what happens where it cannot be read."""

from __future__ import annotations

import base64
import math
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

# 10 ** 9 values, if each alias were a copy
BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
WITH_COMMENTS = """\
// a comment
{
  # another
  "train_batch_size": 8, /* and
  another */
  bf16: {"enabled": true,},
}
"""


def write(folder: Path, text: str | bytes, name: str = "ds.json") -> str:
    path = folder / name
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
        ('{"zero": {"b": [{"c": 1, "c": 1}], "d": 1, "d": 2}}',
         "PATH: zero.b[0].c, zero.d: given more than once; keep one"),
        ("[1, 2]", "PATH: a config must be one object: { ... }"),
        ("just words", "PATH: a config must be one object: { ... }"),
        ('{"a": [1, 2}',
         ("PATH:1: Found a punctuator character when expecting a quoteless string (check your syntax); "
          "the file must be one JSON object")),
        (b"\xff\xfe\x00", "PATH: not a text in UTF-8 (byte 0)"),
        (f'{{"a": {"1" * 5000}}}', "PATH: a number is too large to be read"),
        ('{"a": 1e400}', "PATH: a number is too large to be read"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_source(path)
    assert str(caught.value) == message.replace("PATH", path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("-3", -3), ("+3", 3), ("0", 0), ("1e-5", 1e-5), ("1E5", 1e5), ("1.0e-8", 1e-8),
        (".5", 0.5), ("2.", 2.0),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), (".inf", math.inf),
        # what YAML 1.1 would guess
        ("yes", "yes"), ("off", "off"), ("010", "010"), ("0x10", "0x10"), ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"), (".", "."), (".e5", ".e5"), ("1e", "1e"), ("e5", "e5"),
        # quoted, or a block
        ('"8"', "8"), ("'true'", "true"), ('""', ""), ("|\n  8", "8"), (">-\n  a\n  b", "a b"),
        # nested
        ("[0.9, 1e-5]", [0.9, 1e-5]), ("{b: {c: [1, x]}}", {"b": {"c": [1, "x"]}}),
        ("\n  b: 1 # more", {"b": 1}),
        ("&b {c: 1}\nd: *b", {"c": 1}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["ds.yaml", "ds.yml", "DS.YAML"])
def test_a_scalar_of_yaml_means_what_it_means_in_json_or_is_a_text(
    tmp_path: Path, text: str, value: object, name: str
) -> None:
    found = read_source(write(tmp_path, f"a: {text}", name))[1]["a"]
    assert (found, type(found)) == (value, type(value))


def test_json_is_yaml_too(tmp_path: Path) -> None:
    text = WITH_COMMENTS.replace("// a comment", "").replace("/* and\n  another */", "")
    assert read_source(write(tmp_path, text, "ds.yaml"))[1] == VALUES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "PATH: a: given more than once; keep one"),
        ("a: {b: [{c: 1, c: 2}]}", "PATH: a.b[0].c: given more than once; keep one"),
        ("a: 1\n1: {x: 1}\n1: {}", "PATH: 1: given more than once; keep one"),
        ("- a\n- b", "PATH: a config must be one object: { ... }"),
        ("# nothing yet", "PATH: a config must be one object: { ... }"),
        ("a: 1\nb: [1, 2\nc: 3",
         ("PATH:3: while parsing a flow sequence, expected ',' or ']', but got ':'; the file "
          "must be one YAML mapping")),
        ("a: 1\n---\na: 2",
         ("PATH:2: expected a single document in the stream, but found another document; the file must be "
          "one YAML mapping")),
        ("a: 1\n\tb: 2",
         ("PATH:2: while scanning for the next token, found character '\\t' that cannot start any token; "
          "the file must be one YAML mapping")),
        ("a: 1\nb: !!python/object:os.system x",
         "PATH:2: the tag !!python/object:os.system is not read; the file must be one YAML mapping"),
        ("a: 1\n? [b]\n: 2", "PATH:2: a key is not a word; the file must be one YAML mapping"),
        ("a: \x01",
         ('PATH: unacceptable character #x0001: special characters are not allowed in "<unicode string>", '
          'position 3; the file must be one YAML mapping')),
        (f"a: {'1' * 5000}", "PATH: a number is too large to be read"),
        ("a: &a [*a]", "PATH: objects or lists stand too deep inside each other"),
        (BOMB,
         ("PATH:1: with its aliases written out it has more than 100000 values; write fewer aliases; the "
          "file must be one YAML mapping")),
        (f"a: {'[' * 2_000}", "PATH: objects or lists stand too deep inside each other"),
    ],
)  # fmt: skip
def test_a_yaml_file_that_is_no_config_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text, "ds.yaml")
    with pytest.raises(ConfigError) as caught:
        read_source(path)
    assert str(caught.value) == message.replace("PATH", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "x\x01y"}',
         (r"PATH:1: a text holds a control character as it is; write \u0001 in its place; the file must "
          r"be one JSON object")),
        ('{"a\n": 1}',
         (r"PATH:2: a text holds a control character as it is; write \n in its place; the file must be "
          r"one JSON object")),
        (r'{"a": "\q"}', r'PATH:1: Invalid \X escape sequence "q"; the file must be one JSON object'),
    ],
)  # fmt: skip
def test_a_text_that_json_does_not_take_is_shown(tmp_path: Path, text: str, message: str) -> None:
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
        ("absent.json",
         "absent.json: no such file; give the path of a ds_config, a dict, or base64 of a JSON object"),
        ("bm8gY29uZmln",
         "bm8gY29uZmln: no such file; give the path of a ds_config, a dict, or base64 of a JSON object"),
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
