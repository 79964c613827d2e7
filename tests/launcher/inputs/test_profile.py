"""--profile: options from a YAML file in front of those that were typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.command_line.prefix_command import PrefixCommand
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.profile import parse_profile
from dslaunch.launcher.options import Options, SshOptions
from dslaunch.launcher.run import run_job
from tests.mistakes import mistakes

Launch = Callable[..., "Options | str"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Launch:
    """The options that a command line means beside a job.yaml, or the one line with which it is refused."""

    def launched(profile: str, *words: str) -> Options | str:
        taken: list[Options] = []
        monkeypatch.setattr(run_job, "run", lambda options: taken.append(options) or 0)
        monkeypatch.chdir(tmp_path)
        Path("job.yaml").write_text(profile)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        printed = capsys.readouterr().err
        assert ended.value.code == (2 if printed else 0)
        return taken[0] if taken else printed.removeprefix("dslaunch: ").removesuffix("\n")

    return launched


JOB = """
hostfile: data/hosts   # relative to the current folder
num-gpus: 4
no_local_rank: true
quiet: false
ssh_user: 010
script: train.py
args: [--epochs, 3, --name, two words, "", yes]
"""
JOB_OPTIONS = {"hostfile": "data/hosts", "num_gpus": 4, "no_local_rank": True, "ssh": SshOptions(user="010")}
JOB_ARGUMENTS = ("--epochs", "3", "--name", "two words", "", "yes")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--profile", "job.yaml"], {}),
        (["--profile=job.yaml"], {}),
        (["--prof", "job.yaml", "--"], {}),
        (["--profile", "job.yaml", "--num_gpus", "2"], {"num_gpus": 2}),
        (["--num_g=2", "--profile", "job.yaml"], {"num_gpus": 2}),
        (["--num_acc", "2", "--profile", "job.yaml"], {"num_gpus": 2}),
        (["-Hother", "--profile", "job.yaml"], {"hostfile": "other"}),
        (
            ["-q", "--profile", "job.yaml", "-H", "other"],
            {"hostfile": "other", "quiet": True, "log_level": "error"},
        ),
        (
            ["-qH", "other", "--profile", "job.yaml"],
            {"hostfile": "other", "quiet": True, "log_level": "error"},
        ),
        (["--ssh_user=", "--profile", "job.yaml"], {"ssh": SshOptions()}),
        (["-H", "", "--profile", "job.yaml", "--num_gpus="], {"hostfile": None, "num_gpus": -1}),
        (["--profile", "job.yaml", "eval.py", "-x"], {"program": "eval.py", "arguments": ("-x",)}),
        (["--profile", "job.yaml", "--", "eval.py"], {"program": "eval.py", "arguments": ()}),
    ],
)
def test_what_is_typed_replaces_what_the_file_says(
    launch: Launch, words: list[str], expected: dict[str, object]
) -> None:
    job = {"program": "train.py", "arguments": JOB_ARGUMENTS, **JOB_OPTIONS}
    assert launch(JOB, *words) == Options(**{**job, **expected})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("script: -", {"program": "-"}),
        ("script: --odd.py\nargs: [--, -x]", {"program": "--odd.py", "arguments": ("--", "-x")}),
        ("script: t.py\nargs: --lr 1e-3 --name 'a b'", {"arguments": ("--lr", "1e-3", "--name", "a b")}),
        ("script: t.py\nargs: ''", {}),
        ("script: t.py\nargs: []", {}),
        ("script: t.py\nnum_nodes: 2:4", None),
        ("script: t.py\ninclude: 'w0:0-3,6@w1'", {"include": "w0:0-3,6@w1"}),
        ("script: t.py\nvenv_script: --odd", {"venv_script": "--odd"}),
        ("script: t.py\nvenv_script: a=b", {"venv_script": "a=b"}),
        ("{script: t.py, dry-run: TRUE, force_multi: False}", {"dry_run": True}),
        ("\ufeffscript: t.py", {}),
    ],
)
def test_a_file_says_the_same_as_typed_words(
    launch: Launch, profile: str, expected: dict[str, object] | None
) -> None:
    typed = launch("", "--num_nodes", "2:4", "t.py") if expected is None else None
    assert launch(profile, "--profile=job.yaml") == typed or Options(
        **{"program": "t.py", **(expected or {})}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("profile", "message"), mistakes("profile"))
def test_a_bad_file_is_refused_with_its_name_and_key(launch: Launch, profile: str, message: str) -> None:
    printed = launch(profile, "--profile", "job.yaml")
    assert isinstance(printed, str)
    assert message in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--profile", "nobody.yaml"],
            "--profile=nobody.yaml: cannot be read (No such file or directory); give",
        ),
        (["--profile", "."], "--profile=.: cannot be read (Is a directory); give the path of a YAML file"),
        (["--profile="], "--profile takes one file, and stands once; write e.g. --profile job.yaml"),
        (["--profile"], "--profile takes one file, and stands once; write e.g. --profile job.yaml"),
        (["--profile", "job.yaml", "--profile", "job.yaml"], "--profile takes one file, and stands once;"),
    ],
)
def test_a_file_that_cannot_be_used(launch: Launch, words: list[str], message: str) -> None:
    printed = launch(JOB, *words)
    assert isinstance(printed, str)
    assert printed.startswith(message)


def test_a_file_that_is_not_text_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff")
    assert launch("", "--profile", "bad.yaml") == (
        "--profile=bad.yaml: not text (byte 3 is not UTF-8); give the path of a YAML file"
    )


def test_an_option_of_the_script_is_not_ours(launch: Launch) -> None:
    options = launch("", "train.py", "--profile", "job.yaml")
    assert options == Options(program="train.py", arguments=("--profile", "job.yaml"))


def test_lists_are_for_options_that_may_be_repeated(tmp_path: Path) -> None:
    """And one that is typed replaces all of the file's."""
    taken: list[tuple[str, ...]] = []
    command = PrefixCommand(
        "job",
        params=[
            click.Option(["--env"], multiple=True),
            click.Option(["--profile"], expose_value=False),
            click.Argument(["words"], nargs=-1),
        ],
        callback=lambda env, words: taken.append(env),
    )
    (tmp_path / "job.yaml").write_text("env: [A=1, B=2]\nscript: t.py")
    for words in ([], ["--env=C=3"]):
        command.main([f"--profile={tmp_path}/job.yaml", *words], standalone_mode=False)
    assert taken == [("A=1", "B=2"), ("C=3",)]


OPTIONS = {name: one for one in cli.dslaunch.params if isinstance(one, click.Option) for name in one.opts}
_WORDS = (
    "script",
    "args",
    "num_gpus",
    "quiet",
    ": ",
    "- ",
    ", ",
    "&a ",
    "*a",
    "!!set ",
    "true",
    "<<",
    "? ",
    "---",
)
_pieces = st.sampled_from([*_WORDS, *"\n[]{}'\"|>#%\t\\1"])


@given(st.lists(_pieces | st.text(max_size=3), max_size=30).map("".join))
@settings(max_examples=300)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        words = parse_profile(text, OPTIONS, source="job.yaml")
    except LaunchError as refused:
        message = str(refused)
    else:
        message = "job.yaml: read"
        assert all(word.startswith("--") for word in words.options)
        assert not words.script or len(words.script) > 2
    assert re.fullmatch(r"job\.yaml:[^\n]+", message)
