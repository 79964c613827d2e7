"""Scripts that would take --local_rank=N for an argument of their own are known by their text."""

from __future__ import annotations

import pytest

from dslaunch.launcher.node.observe.refused_argument import why_misread


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ("import sys\npath = sys.argv[1]\n", True),
        ("from sys import argv\nif len(argv) > 2:\n    load(argv[ 2 ])\n", True),
        ("local_rank = int(os.environ['LOCAL_RANK'])\npath = sys.argv[1]\n", True),
        ("parser.add_argument('--local_rank')\nname = sys.argv[1]\n", False),
        ("args = parser.parse_args(sys.argv[1:])\n", False),
        ("print(sys.argv[0])\n", False),
        ("# path = sys.argv[1]\n", False),
        ("import torch\n", False),
    ],
)
def test_a_script_that_counts_its_arguments_is_named(source: str, is_named: bool) -> None:
    assert ("give dslaunch --no_local_rank" in why_misread(source.encode())) is is_named
