"""Arguments, variables and output arrive byte for byte, in every locale,
and nothing of them is on a command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.launcher.local_job import FORGOTTEN, MARK, Job, Start, poll

pytestmark = pytest.mark.slow

any_bytes = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b""))


def exact(folder: Path, words: list[bytes], values: list[bytes], env: Mapping[str, str]) -> None:
    """These arguments and these values of an environment file arrive as they are."""
    (folder / "train.py").write_text(
        "import os\n"
        "os.makedirs('got', exist_ok=True)\n"
        "for name in ('cmdline', 'environ'):\n"
        "    with open('/proc/self/' + name, 'rb') as file, open('got/' + name, 'wb') as copy:\n"
        "        copy.write(file.read())\n"
    )
    lines = [b"V%d=%s\n" % (place, quoted(value)) for place, value in enumerate(values)]
    (folder / ".deepspeed_env").write_bytes(b"".join(lines))
    job = Job(folder, ["--no_local_rank", "train.py", *words], env=env)
    try:
        assert job.wait() == 0, job.err
    finally:
        job.end()
    got = (folder / "got" / "cmdline").read_bytes().split(b"\0")
    assert got[got.index(b"train.py") + 1 : -1] == words
    environ = dict(
        pair.split(b"=", 1) for pair in (folder / "got" / "environ").read_bytes().split(b"\0") if pair
    )
    assert [environ[b"V%d" % place] for place in range(len(values))] == values
    for name, value in env.items():
        if not name.startswith(("PYTHON", "LC_", "LOCPATH")):
            assert environ[os.fsencode(name)] == os.fsencode(value)


def quoted(value: bytes) -> bytes:
    return b"'" + value.replace(b"'", b"'\"'\"'") + b"'"


@settings(max_examples=3)
@given(
    words=st.lists(any_bytes, max_size=30).filter(lambda words: words[:1] != [b"--"]),
    values=st.lists(any_bytes, max_size=30),
    shell_value=any_bytes,
)
def test_arguments_and_values_arrive_byte_for_byte(
    words: list[bytes], values: list[bytes], shell_value: bytes, tmp_path: Path
) -> None:
    exact(
        tmp_path, words, values, {"NCCL_ODD": os.fsdecode(shell_value), "OTHER_ODD": os.fsdecode(shell_value)}
    )


ALL_BYTES = bytes(range(1, 256))
UTF8 = "caf\u00e9 \u2192 \U0001f600".encode()


def locale_of(name: str, folder: Path) -> dict[str, str]:
    """The variables of a locale; one that is not UTF-8 is made in `folder`."""
    if name == "C":
        return {"LC_ALL": "C"}
    if name == "C without UTF-8":
        return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if shutil.which("localedef") is None:
        pytest.skip("no localedef here")
    path = folder / "locale" / "en_US.ISO-8859-1"
    path.parent.mkdir()
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", path], capture_output=True, check=False
    )
    if not path.exists():
        pytest.skip(f"localedef: {made.stderr!r}")
    return {"LOCPATH": str(path.parent), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("name", ["C without UTF-8", "Latin-1"])
def test_bytes_arrive_in_every_locale(name: str, tmp_path: Path) -> None:
    env = {**locale_of(name, tmp_path), "NCCL_ODD": os.fsdecode(ALL_BYTES), "NCCL_UTF8": os.fsdecode(UTF8)}
    exact(tmp_path, [ALL_BYTES, UTF8], [ALL_BYTES, UTF8], env)


@pytest.mark.parametrize("name", ["C", "Latin-1"])
def test_output_passes_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start(
        f"os.write(1, {UTF8!r} + b' \\xff\\n'); sys.stdout = None; sys.exit(3)", env=locale_of(name, tmp_path)
    )
    assert job.wait() == 3
    assert (tmp_path / "stdout").read_bytes() == b"localhost:0 | " + UTF8 + b" \xff\n"
    assert b"    " + UTF8 + b" \xff\n" in (tmp_path / "stderr").read_bytes()


@pytest.mark.parametrize("name", ["C without UTF-8", "Latin-1"])
def test_a_dry_run_prints_in_every_locale(name: str, start: Start, tmp_path: Path) -> None:
    job = start("", "--dry_run", "--", UTF8.decode(), env=locale_of(name, tmp_path))
    assert job.wait() == 0, job.err


TELL_ENVIRONMENT = r"""
with open('/proc/self/environ') as file:  # and not what Python adds to its own: LC_CTYPE in the C locale
    names = {pair.partition('=')[0] for pair in file.read().split('\0')}
with open(f'of_ranks/{rank}', 'w') as file:  # and not what was for the start of Python only
    file.write('\0'.join(f'{name}={value}' for name, value in os.environ.items() if name in names))
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--num_gpus=1"],
        ["--num_gpus=2", "--trace=1-2", "--max_nodes=1", "--mesh=pp=2", "--metrics_interval=2"],
    ],
    ids=" ".join,
)
def test_the_environment_is_that_of_the_launcher_and_what_dslaunch_env_shows(
    options: list[str], start: Start, tmp_path: Path
) -> None:
    (tmp_path / "of_ranks").mkdir()
    job = start(TELL_ENVIRONMENT, *options)
    assert job.wait() == 0, job.err
    for file in (tmp_path / "of_ranks").iterdir():
        got = dict(pair.split("=", 1) for pair in file.read_text().split("\0"))
        asked = Job(tmp_path, ["env", *options, f"--rank={file.name}", "train.py"])
        assert asked.wait() == 0, asked.err
        rows = re.findall(r"^  (\w+)=(.*)  \(from (.*)\)$", asked.out, flags=re.MULTILINE)
        shown = {name: value for name, value, why in rows if "if the host has GPUs" not in why}
        own = {name for name in os.environ if not name.startswith(FORGOTTEN)} | {MARK, "PWD", "SHLVL", "_"}
        assert got.keys() - (own - shown.keys()) == shown.keys()
        known = {name: value for name, value in shown.items() if value.endswith("'")}
        assert known.keys() > {"RANK", "WORLD_SIZE", "DSLAUNCH_METRICS_INTERVAL"}
        assert {name: repr(got[name]) for name in known} == known


def test_no_value_is_on_a_command_line(start: Start, tmp_path: Path) -> None:
    secret = "s3cret-" + uuid.uuid4().hex
    (tmp_path / ".deepspeed_env").write_text(f"MY_TOKEN={secret}\n")
    (tmp_path / "venv.sh").write_text("touch sourcing; while [ ! -e go ]; do sleep 0.01; done\n")
    job = start(
        "say(len(os.environ['MY_TOKEN'])); wait()", "--venv_script=venv.sh", env={"NCCL_SECRET": secret}
    )
    seen: set[str] = set()

    def look() -> None:
        for pid in job.survivors():
            with contextlib.suppress(OSError):
                seen.add(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))

    def is_sourcing() -> bool:
        look()
        return (tmp_path / "sourcing").exists()

    poll(is_sourcing, "the venv script")
    (tmp_path / "go").touch()
    job.wait_for(str(len(secret)))
    look()
    assert any("train.py" in line for line in seen)
    assert not [line for line in seen if secret in line]
