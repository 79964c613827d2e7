"""Which scripts may share one import of torch, and which start as ever, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.node.workers.shared_import import SharedImport, shared_import
from tests.launcher.local_job import Job

SAFE = [
    "import torch",
    "import torch.distributed as dist",
    "from torch import nn",
    "import dslaunch",
    '"""What it does."""\nfrom __future__ import annotations\nimport os, sys\nimport numpy\nimport torch',
    "import os\nNAME = 'x'\ndef main(count=1, *, rate=0.1):\n    os.environ['A'] = '1'\nimport torch",
]
UNSAFE = [
    ("import os\nos.environ['A'] = '1'\nimport torch", "line 2 is run before torch is imported"),
    ("import os\nos.environ.setdefault('A', '1')\nimport torch", "line 2 is run before torch is imported"),
    ("import pandas\nimport torch", "line 1 imports pandas before torch"),
    ("import os, pandas, torch", "line 1 imports pandas before torch"),
    ("import local\nimport torch", "line 1 imports local before torch"),
    ("from . import local\nimport torch", "line 1 imports . before torch"),
    ("import random\nimport torch", "line 1 imports random before torch"),  # a file of the folder
    ("try:\n    import torch\nexcept ImportError:\n    pass", "line 1 is run before torch is imported"),
    ("if True:\n    import torch", "line 1 is run before torch is imported"),
    ("def main(x=print()):\n    pass\nimport torch", "line 1 is run before torch is imported"),
    ("@print\ndef main():\n    pass\nimport torch", "line 2 is run before torch is imported"),
    ("class A:\n    print()\nimport torch", "line 1 is run before torch is imported"),
    ("A = print()\nimport torch", "line 1 is run before torch is imported"),
    ("import sys\nsys.path = 1\nimport torch", "line 2 is run before torch is imported"),
]
NO_QUESTION = [
    "",
    "import os",
    "def main():\n    import torch",
    "# torch",
    "import torch as",
    "\0torch",
    "torch = 1",
]


def found(folder: Path, text: str, **changed: object) -> SharedImport:
    script = folder / "train.py"
    script.write_text(text)
    given = {"num_workers": 2, "num_devices": 0, "env": {}, **changed}
    return shared_import(str(given.pop("script", script)), **given)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "random.py").touch()
    (tmp_path / "local.py").touch()
    return tmp_path


@pytest.mark.parametrize("text", SAFE)
def test_torch_is_shared_where_nothing_happens_before_it(folder: Path, text: str) -> None:
    assert found(folder, text) == (["torch"], "")


@pytest.mark.parametrize(("text", "why_not"), UNSAFE)
def test_what_happens_before_it_is_the_reason(folder: Path, text: str, why_not: str) -> None:
    assert found(folder, text) == ([], why_not)


@pytest.mark.parametrize("text", NO_QUESTION)
def test_where_torch_is_not_imported_at_the_top_there_is_nothing_to_say(folder: Path, text: str) -> None:
    assert found(folder, text) == ([], "")


def test_a_torch_of_the_folder_is_not_shared(folder: Path) -> None:
    (folder / "torch").mkdir()
    assert found(folder, "import torch") == ([], "line 1 imports torch before torch")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_workers": 1}, ([], "")),
        ({"num_devices": 2}, ([], "this host has GPUs")),
        ({"env": {b"COVERAGE_PROCESS_START": b"x"}}, ([], "COVERAGE_PROCESS_START is set")),
        ({"script": "/no/such.py"}, ([], "")),
        ({"script": "/etc/passwd"}, ([], "")),
    ],
)
def test_where_it_is_not_asked(
    folder: Path, changed: dict[str, object], expected: tuple[list[str], str]
) -> None:
    assert found(folder, "import torch", **changed) == expected


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_runs_at_its_start_may_ask_for_the_rank(folder: Path, name: str) -> None:
    (folder / "site").mkdir()
    env = {b"PYTHONPATH": f"/nothing:{folder / 'site'}".encode()}
    assert found(folder, "import torch", env=env) == (["torch"], "")
    (folder / "site" / f"{name}.py").touch()
    why_not = f"PYTHONPATH has a {name}, which Python runs at its start"
    assert found(folder, "import torch", env=env) == ([], why_not)


def test_no_script_is_nothing_to_look_at() -> None:
    assert shared_import(None, num_workers=2, num_devices=0, env={}) == ([], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words", "is_shared", "said"),
    [
        ("", (), True, "2 workers are forked from one import of torch: "),
        ("os.environ['X'] = 'y'", (), False, "each worker imports torch for itself: line 3 is run before"),
        ("", ("--preload=none",), False, ""),
    ],
)
def test_a_job_says_what_was_done(
    tmp_path: Path, first: str, words: tuple[str, ...], is_shared: bool, said: str
) -> None:
    """A torch of its own, so that it is quick: it says where it was imported."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os\nHERE = os.getpid()\n")
    (tmp_path / "train.py").write_text(
        f"import os\nimport sys\n{first}\nimport torch\nprint(torch.HERE == os.getpid(), sys.argv)\n"
    )
    words = ("--timings", "--num_gpus=2", *words, "train.py")
    job = Job(tmp_path, words, env={"PYTHONPATH": str(tmp_path / "site")})
    assert job.wait() == 0, job.err
    for rank in range(2):
        assert job.lines(rank) == [f"{not is_shared} ['train.py', '--local_rank={rank}']"]
    assert said in job.err
    assert ("import" in job.err) is bool(said)
