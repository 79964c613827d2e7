from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.node.system.address import is_address


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("10.0.0.7", True),
        ("fd00::7", True),
        ("::ffff:10.0.0.7", True),
        ("fe80::1%eth0", True),
        ("node1", False),
        ("node1.example.com", False),
        ("1042", False),  # a name that some clusters give
        ("10.0.0", False),
        ("010.0.0.7", False),
        ("10.0.0.7:22", False),
        ("UNKNOWN", False),  # sshd's word
        ("", False),
        ("10.0.0.7\0", False),
        ("10.0.0.7\udcff", False),
    ],
)
def test_an_address_is_told_from_a_name(word: str, expected: bool) -> None:
    assert is_address(word) is expected


@given(word=st.text(alphabet="0129abf:.%", max_size=20))
def test_the_modules_of_python_say_the_same(word: str) -> None:
    try:
        ipaddress.ip_address(word.partition("%")[0])
    except ValueError:
        assert not is_address(word)
    else:
        assert is_address(word)
