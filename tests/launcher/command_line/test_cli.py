from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import click
import pytest
from hypothesis import given, strategies as st

from dslaunch import __version__
from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import EXIT_HOST, LaunchError
from dslaunch.launcher.options import Options, SshOptions
from dslaunch.launcher.options.backend import LAUNCHERS, BackendOptions
from dslaunch.launcher.options.elastic import ElasticOptions
from dslaunch.launcher.options.metrics import ListenAddress, MetricsOptions
from dslaunch.launcher.options.option import JobOption
from dslaunch.launcher.options.rendezvous import RendezvousOptions
from dslaunch.launcher.options.restart import RestartOptions
from dslaunch.launcher.run import host_pool, make_plan, run_job
from tests.mistakes import mistakes

GOLDEN = Path(__file__).parents[1] / "golden"
Parse = Callable[..., Options]
Fail = Callable[..., str]

# Every option, as it is written. Who adds one adds it here, to the documentation, and checks which shortened
# forms in people's scripts it makes ambiguous.
OPTIONS = [
    ("-H", "--hostfile"),
    ("-i", "--include"),
    ("-e", "--exclude"),
    ("--num_nodes",),
    ("--exec_prefix",),
    ("--num_gpus", "--num_accelerators"),
    ("--master_addr",),
    ("--master_port",),
    ("--ssh_port",),
    ("--ssh_user",),
    ("--ssh_identity",),
    ("--ssh_config",),
    ("--connect_timeout",),
    ("--venv_script",),
    ("-m", "--module"),
    ("--no_python",),
    ("--no_local_rank",),
    ("--force_multi",),
    ("--dry_run",),
    ("--kill_grace",),
    ("--hang_limit",),
    ("--heartbeat",),
    ("--report",),
    ("--log_level",),
    ("-q", "--quiet"),
    ("--profile",),
    ("--version",),
    ("--autotuning",),
    # launcher/options/logs.py
    ("--log_dir",),
    ("--tee", "--ranks"),
    ("--prefix",),
    ("--timestamps",),
    ("--fold",),
    ("--fold_failures",),
    ("--enable_each_rank_log",),
    # launcher/options/restart.py
    ("--max_restarts",),
    ("--spares",),
    ("--min_nodes", "--min_elastic_nodes"),
    ("--max_nodes", "--max_elastic_nodes"),
    ("--min_uptime",),
    ("--elastic_training",),
    # launcher/options/roles.py
    ("--role",),
    ("--role_health",),
    ("--role_timeout",),
    ("--role_restarts",),
    ("--role_may_end",),
    # launcher/options/elastic.py
    ("--notice_file",),
    ("--notice_command",),
    # launcher/options/rendezvous.py
    ("--no_ssh",),
    ("--no_ssh_check",),
    ("--node_rank",),
    ("--coordinator_port",),
    ("--rendezvous_timeout",),
    ("--job_id",),
    # launcher/options/mesh.py
    ("--mesh",),
    ("--mesh_estimate",),
    # launcher/options/binding.py
    ("--bind_cores_to_rank",),
    ("--bind_core_list",),
    # launcher/options/process.py
    ("--save_pid",),
    ("--stack_on_hang",),
    ("--stdin",),
    # launcher/options/drop_in.py
    ("--drop_in",),
    # launcher/options/backend.py
    ("--launcher",),
    ("--launcher_args",),
    # launcher/options/start.py
    ("--connect_window",),
    ("--timings",),
    ("--preload",),
    ("--prepare_timeout",),
    # launcher/options/tree.py
    ("--tree_above",),
    ("--tree_radix",),
    # launcher/options/check.py
    ("--check",),
    ("--check_gpu",),
    ("--check_bandwidth",),
    # launcher/options/detach.py
    ("--detach",),
    ("--watch",),
    ("--name",),
    # launcher/options/sync.py
    ("--sync",),
    ("--sync_force",),
    ("--collect",),
    ("--collect_to",),
    # launcher/options/metrics.py
    ("--metrics_interval",),
    ("--events",),
    ("--metrics_port",),
    # launcher/options/snapshots.py
    ("--snapshot_every",),
    # launcher/options/end.py
    ("--on_end",),
    ("--webhook",),
    # launcher/options/trace.py
    ("--trace",),
    ("--trace_ranks",),
    ("--trace_to",),
    ("-h", "--help"),
]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """The options that a command line means."""

    def parsed(*words: str) -> Options:
        taken: list[Options] = []
        monkeypatch.setattr(run_job, "run", lambda options: taken.append(options) or 0)
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        assert ended.value.code == 0
        return taken[0]

    return parsed


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fail:
    """What a command line with a mistake in it prints: one line, and exit code 2."""

    def failed(*words: str) -> str:
        monkeypatch.setattr(run_job, "run", lambda options: pytest.fail(f"accepted: {options}"))
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        printed = capsys.readouterr()
        assert ended.value.code == 2
        assert printed.out == ""
        assert re.fullmatch(r"dslaunch: [^\n]+\n", printed.err)
        return printed.err.removeprefix("dslaunch: ").removesuffix("\n")

    return failed


def context_of(command: click.Command) -> click.Context:
    return command.make_context("dslaunch", ["train.py"])


def test_the_options_are_these() -> None:
    context = context_of(cli.dslaunch)
    options = [tuple(one.opts) for one in cli.dslaunch.get_params(context) if isinstance(one, click.Option)]
    assert sorted(options) == sorted(OPTIONS)


def test_nothing_but_a_script_means_the_defaults(parse: Parse) -> None:
    assert parse("train.py") == Options(program="train.py")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-H hosts", {"hostfile": "hosts"}),
        ("-Hhosts", {"hostfile": "hosts"}),
        ("-H=hosts", {"hostfile": "hosts"}),
        ("--hostfile hosts", {"hostfile": "hosts"}),
        ("--hostfile=hosts", {"hostfile": "hosts"}),
        ("--hostfile=a=b", {"hostfile": "a=b"}),
        ("-i w0:0@w1", {"include": "w0:0@w1"}),
        ("-i=w0:0@w1", {"include": "w0:0@w1"}),
        ("--exclude w0:0", {"exclude": "w0:0"}),
        ("--num_nodes 2 --num_gpus=4", {"num_nodes": 2, "num_gpus": 4}),
        (
            "--num_nodes 2:4",
            {
                "num_nodes": -1,
                "restart": RestartOptions(min_nodes=2, max_nodes=4),
                "elastic": ElasticOptions(is_on=True),
            },
        ),
        (
            "--notice_file /run/going --notice_command true",
            {"elastic": ElasticOptions(is_on=True, notice_file="/run/going", notice_command="true")},
        ),
        ("--num_accelerators 4", {"num_gpus": 4}),
        ("--num_gpus -1", {"num_gpus": -1}),
        ("--num_gpus 1 --num_gpus 2", {"num_gpus": 2}),
        ("--master_addr 10.0.0.1 --master_port 1", {"master_addr": "10.0.0.1", "master_port": 1}),
        ("--master_port 65535", {"master_port": 65535}),
        ("--master_addr [fd00::7]", {"master_addr": "fd00::7"}),
        ("--master_addr fe80::1%eth0", {"master_addr": "fe80::1%eth0"}),
        ("--launcher LOCAL", {"backend": BackendOptions(launcher=LAUNCHERS["local"])}),
        (
            "--launcher OpenMPI --launcher_args -k",
            {"backend": BackendOptions(launcher=LAUNCHERS["openmpi"], launcher_args=("-k",))},
        ),
        (
            "--ssh_port 22 --ssh_user ada --ssh_identity k --ssh_config c --connect_timeout 2.5",
            {"ssh": SshOptions(port=22, user="ada", identity="k", config="c", connect_timeout_s=2.5)},
        ),
        ("--venv_script env.sh", {"venv_script": "env.sh"}),
        ("--exec_prefix=true", {"exec_prefix": ("true",)}),
        ("-m", {"is_module": True}),
        ("--module", {"is_module": True}),
        ("--no_python --no_local_rank", {"no_python": True, "no_local_rank": True}),
        ("--force_multi --dry_run", {"force_multi": True, "dry_run": True}),
        ("--kill_grace 0 --heartbeat 1", {"kill_grace_s": 0.0, "heartbeat_s": 1.0}),
        ("--report out.json", {"report": "out.json"}),
        ("--metrics_port 9400", {"metrics": MetricsOptions(endpoint=ListenAddress("127.0.0.1", 9400))}),
        ("--metrics_port [::]:9400", {"metrics": MetricsOptions(endpoint=ListenAddress("::", 9400))}),
        ("--no_ssh_check", {"rendezvous": RendezvousOptions(no_ssh_check=True)}),
        ("--node_rank -1", {}),
        (
            "--no_ssh --node_rank 1 --coordinator_port 0 --rendezvous_timeout 9 --job_id a",
            {
                "rendezvous": RendezvousOptions(
                    no_ssh=True, node_rank=1, coordinator_port=0, timeout_s=9.0, job_id="a"
                )
            },
        ),
        ("--log_level WARNING", {"log_level": "warning"}),
        ("-q", {"quiet": True, "log_level": "error"}),
        ("--quiet --log_level debug", {"quiet": True, "log_level": "error"}),
        ("-qm", {"is_module": True, "quiet": True, "log_level": "error"}),
        ("-qHhosts", {"hostfile": "hosts", "quiet": True, "log_level": "error"}),
        ("-qH hosts --num_n 2", {"hostfile": "hosts", "quiet": True, "log_level": "error", "num_nodes": 2}),
        ("-m -H hosts --num_n 2", {"hostfile": "hosts", "is_module": True, "num_nodes": 2}),
    ],
)
def test_an_option_and_its_spellings(parse: Parse, words: str, expected: dict[str, object]) -> None:
    assert parse(*words.split(), "train.py") == Options(program="train.py", **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num_g 2", {"num_gpus": 2}),
        ("--num_a 2", {"num_gpus": 2}),
        ("--num_n=2", {"num_nodes": 2}),
        ("--host hosts", {"hostfile": "hosts"}),
        ("--ho hosts --inc w0", {"hostfile": "hosts", "include": "w0"}),
        ("--hostfi=hosts --exc=w0", {"hostfile": "hosts", "exclude": "w0"}),
        ("--master_p 1 --master_a x", {"master_port": 1, "master_addr": "x"}),
        (
            "--launcher slurm --launcher_a=-v",
            {"backend": BackendOptions(launcher=LAUNCHERS["slurm"], launcher_args=("-v",))},
        ),
        ("--no_p --no_l", {"no_python": True, "no_local_rank": True}),
        ("--mod", {"is_module": True}),
        ("--dry --force", {"dry_run": True, "force_multi": True}),
        ("--qui", {"quiet": True, "log_level": "error"}),
        # Words with dashes are as good, and the value is never taken for an option.
        ("--num-nodes 2 --master-port=1", {"num_nodes": 2, "master_port": 1}),
        ("--dry-run", {"dry_run": True}),
        ("--venv-s a-b", {"venv_script": "a-b"}),
        ("--venv_script=--num_n", {"venv_script": "--num_n"}),
    ],
)
def test_a_long_option_may_be_shortened(parse: Parse, words: str, expected: dict[str, object]) -> None:
    assert parse(*words.split(), "train.py") == Options(program="train.py", **expected)  # type: ignore[arg-type]


def test_launcher_args_are_split_as_by_a_shell(parse: Parse) -> None:
    options = parse("--launcher=mpich", "--launcher_args", "-iface 'eth 1' --x=\"a b\" it\\'s", "t.py")
    assert options.backend.launcher_args == ("-iface", "eth 1", "--x=a b", "it's")


@pytest.mark.parametrize("name", [name for names in OPTIONS for name in names if name.startswith("--")])
def test_shortened_forms_are_those_of_argparse(name: str) -> None:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for names in OPTIONS:
        parser.add_argument(*names, action="store_true", dest=names[-1])
    command = cli.dslaunch
    options = {
        one: option
        for option in command.get_params(context_of(command))
        if isinstance(option, click.Option)
        for one in option.opts
    }
    for length in range(3, len(name) + 1):
        word = name[:length]
        try:
            expected = next(dest for dest, is_set in vars(parser.parse_args([word])).items() if is_set)
        except (argparse.ArgumentError, SystemExit):
            with pytest.raises(click.UsageError, match="ambiguous"):
                command._full_name(word, options)
        else:
            assert options[command._full_name(word, options)].opts[-1] == expected


@pytest.mark.parametrize(
    ("words", "program", "arguments"),
    [
        (["t.py"], "t.py", ()),
        (["t.py", "--lr", "0.1"], "t.py", ("--lr", "0.1")),
        (["t.py", "--num_gpus", "2", "-q", "-h", "--version"], "t.py",
         ("--num_gpus", "2", "-q", "-h", "--version")),
        (["t.py", "--", "--z"], "t.py", ("--z",)),
        (["t.py", "--", "--", "x"], "t.py", ("--", "x")),
        (["t.py", "a", "--", "x"], "t.py", ("a", "--", "x")),
        (["t.py", "--"], "t.py", ()),
        (["--", "t.py", "--z"], "t.py", ("--z",)),
        (["-q", "--", "t.py"], "t.py", ()),
        (["--num_gpus", "2", "t.py", "--num_g", "3"], "t.py", ("--num_g", "3")),
        (["--no_python", "--no_local_rank", "--", "cmd", "-x"], "cmd", ("-x",)),
        (["-", "x"], "-", ("x",)),
        (["t.py", "", " ", "a b", "$HOME", "*", "~", "`id`", "'", '"', "\\", "\n", "\udcff"], "t.py",
         ("", " ", "a b", "$HOME", "*", "~", "`id`", "'", '"', "\\", "\n", "\udcff")),
        (["t.py", "@file", "-"], "t.py", ("@file", "-")),
    ],
)  # fmt: skip
def test_what_follows_the_script_is_the_script_s(
    parse: Parse, words: list[str], program: str, arguments: tuple[str, ...]
) -> None:
    options = parse(*words)
    assert (options.program, options.arguments) == (program, arguments)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *mistakes("command_line"),
        *(
            (
                f"--tree_above 9 --launcher {name} t.py",
                f"--tree_above=9 has no effect with --launcher={name}; leave it",
            )
            for name in LAUNCHERS
            if name not in ("ssh", "openssh", "pdsh")
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(fail: Fail, words: str, message: str) -> None:
    assert message in fail(*words.split())


# Text as a person may type it by mistake, beside what is right for some option.
odd_values = st.text(max_size=12).filter(lambda text: "\0" not in text) | st.sampled_from(
    [
        "",
        "-",
        "--",
        "-1",
        "0",
        "1.5",
        "nan",
        "1e999",
        "9" * 30,
        "a,b",
        "a@b",
        "a:0",
        "[::1]",
        "'",
        "{",
        "all",
        "2:4",
    ]
)
odd_words = st.builds(
    lambda name, between, value: [f"{name}={value}"] if between == "=" else [name, value],
    st.sampled_from([name for names in OPTIONS for name in names]) | odd_values.map(lambda text: f"-{text}"),
    st.sampled_from("= "),
    odd_values,
)


@given(groups=st.lists(odd_words, max_size=4))
def test_any_words_are_read_or_refused_in_one_line(groups: list[list[str]]) -> None:
    words = [word for group in groups for word in group]
    printed = io.StringIO()
    with (
        mock.patch.object(run_job, "run", return_value=0),
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(["-q", *words, "t.py"])
    said = printed.getvalue()
    assert ended.value.code == (2 if said else 0)
    assert re.fullmatch(r"(dslaunch: [^\n]+\n)?", said)


def test_no_option_with_a_value_is_switched_off_by_an_empty_one(fail: Fail) -> None:
    """As from a variable of the shell that is not set."""
    with context_of(cli.dslaunch) as context:
        parameters = cli.dslaunch.get_params(context)
    options = [one for one in parameters if isinstance(one, click.Option) and not one.is_flag]
    may_be_empty = {one.name for one in options if isinstance(one, JobOption) and one.may_be_empty}
    assert may_be_empty == {"prefix", "launcher_args"}
    names = [name for one in options for name in one.opts if one.name not in may_be_empty | {"profile"}]
    assert len(names) > 30
    for name in names:
        full = (
            name
            if name.startswith("--")
            else {"-H": "--hostfile", "-i": "--include", "-e": "--exclude"}[name]
        )
        for words in ([f"{name}="], [name, ""]):
            assert fail(*words, "t.py").startswith(f"{full} is empty; give it a value (")


@pytest.mark.parametrize("words", [["checkpoint", "ls", ""], ["checkpoint", "diff", "a", ""]])
def test_an_empty_folder_is_not_the_present_one(fail: Fail, words: list[str]) -> None:
    assert "it is empty; give a folder, or . for the present one" in fail(*words)


def test_a_prefix_of_spaces_does_not_run_the_job_outside(fail: Fail) -> None:
    said = fail("--exec_prefix=  ", "train.py")
    assert said.startswith("--exec_prefix: '  ' has no word in it; write e.g. 'podman exec -i box', or leave")


def test_spaces_in_the_name_of_a_user_or_an_address_are_refused(fail: Fail) -> None:
    assert "'ada lovelace' is not a user: its name is made of" in fail("--ssh_user", "ada lovelace", "t.py")
    assert "'ada -v' is not a user" in fail("--ssh_user", "ada -v", "t.py")
    assert "'node 1': a host's name is made of letters" in fail("--master_addr", "node 1", "t.py")


def test_a_value_that_looks_like_an_option_may_be_given_behind_an_equals_sign(parse: Parse) -> None:
    assert parse("--hostfile=--num_gpus", "t.py") == Options(program="t.py", hostfile="--num_gpus")


def test_a_number_may_have_spaces_around_it(parse: Parse) -> None:
    """`wc -l` prints them on some systems."""
    assert parse("--num_gpus", "       4", "t.py") == Options(program="t.py", num_gpus=4)


@pytest.mark.parametrize(
    ("error", "code"),
    [(LaunchError("hosts:7: bad"), 2), (LaunchError("hosts:7: bad", exit_code=EXIT_HOST), 3)],
)
def test_a_launch_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: LaunchError, code: int
) -> None:
    def refuse(options: Options) -> int:
        raise error

    monkeypatch.setattr(run_job, "run", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["t.py"])
    assert ended.value.code == code
    assert capsys.readouterr().err == "dslaunch: hosts:7: bad\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--log_level=debug"],
        ["--log_level", "debug"],
        ["--log_l", "DEBUG"],
    ],
)
def test_with_log_level_debug_the_traceback_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def refuse(options: Options) -> int:
        raise LaunchError("bad")

    monkeypatch.setattr(run_job, "run", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "t.py"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("\ndslaunch: bad\n")


def test_a_script_s_own_log_level_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(options: Options) -> int:
        raise LaunchError("bad")

    monkeypatch.setattr(run_job, "run", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["t.py", "--log_level=debug"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "dslaunch: bad\n"


def test_the_exit_code_is_what_the_job_ended_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "run", lambda options: 139)
    with pytest.raises(SystemExit) as ended:
        cli.main(["t.py"])
    assert ended.value.code == 139


@pytest.mark.parametrize("stderr", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--nosuch t.py", 2),
        # a slow start would be told on stderr, and output that cannot be written ends a job
        ("--num_gpus=1 --log_level=error --no_python --no_local_rank sh -c 'exit 7'", 7),
        ("exec -H nosuch -- true", 2),
    ],
)
def test_the_exit_code_is_the_same_where_stderr_takes_nothing(words: str, code: int, stderr: str) -> None:
    line = f"{Path(sys.executable).with_name('dslaunch')} {words} 2{stderr}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dslaunch {__version__}\n"


@pytest.mark.parametrize("given", [["--module", "--no_python"]])
def test_options_that_contradict_each_other(
    given: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main([*given, "t.py"])
    assert ended.value.code == 2
    assert "--module and --no_python exclude each other" in capsys.readouterr().err


DRY_RUNS = {
    "dry-run-two-hosts": ["-H", "hosts", "train.py", "--name", "two words", "it's"],
    "dry-run-unequal": ["-H", "hosts", "-i", "node1:3@node2", "--no_local_rank", "-m", "package.train"],
    "dry-run-fixed-port": [
        "-H", "hosts", "--master_addr=10.1.1.1", "--master_port=4000", "--num_nodes=1", "--num_gpus=1",
        "--venv_script=/opt/my env.sh", "--no_python", "./train.sh",
    ],
    "dry-run-tree": ["-H", "many", "--tree_above=2", "--tree_radix=1", "--no_local_rank", "train.py"],
    "dry-run-spares": ["-H", "many", "--spares=3", "--no_local_rank", "train.py"],
    "dry-run-local": ["--num_gpus=2", "train.py"],
}  # fmt: skip


def test_a_dry_run_says_which_variables_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1 env.RANK=7 env.MINE=1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry_run", "-H", "hosts", "train.py"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "  environment: RANK='7' (from hosts:1, not used: every rank gets its own)\n" in printed.out
    assert "  environment: MINE='1' (from hosts:1)\n" in printed.out
    assert printed.err == (
        "dslaunch: warning: hosts:1: RANK is not used: every rank gets its own from dslaunch; leave it out\n"
    )


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_what_would_run_where(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("node1 slots=4\nada@node2 slots=2 port=2222\n")
    (tmp_path / "many").write_text("".join(f"node{number} slots=1\n" for number in range(1, 6)))
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\nPATH=/opt/bin:$PATH\nMY_TOKEN=secret\n")
    for variable in [*make_plan.os.environ]:
        if variable.startswith(make_plan.env_file.EXPORTED_PREFIXES) or variable in ("DS_ENV_FILE",):
            monkeypatch.delenv(variable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5 0")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(host_pool.socket, "gethostname", lambda: "NODE1.example.com")
    monkeypatch.setattr(make_plan.sys, "executable", "/opt/py/bin/python")
    monkeypatch.setattr(host_pool, "count_accelerators", lambda: 0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry_run", *DRY_RUNS[name]])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    says = f"dslaunch: warning: no script train.py in {tmp_path}\n"  # known of this machine alone
    assert printed.err == (says if name == "dry-run-local" else "")
    text = printed.out.replace(str(tmp_path), "/home/ada/job")
    assert "secret" not in text
    assert text == (GOLDEN / f"{name}.txt").read_text(), f"\n{text}"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("--dry_run t.py", 0), ("--num_gpus=9 t.py", 2)])
def test_a_warning_is_told_though_the_command_ends_at_once(
    words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The console writes in a thread of its own, and the program does not wait for threads."""
    (tmp_path / "hosts").write_text("node1 slots=4\n")
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", "-H", "hosts", *words.split()],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert done.stderr.startswith("dslaunch: warning: CUDA_VISIBLE_DEVICES=0 is not used")


def test_short_options_and_help_look_for_no_translation(tmp_path: Path) -> None:
    """click does, for the error that it makes of each short option and for the text of --help:
    4 ms of every start.
    """
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    program = (
        "import sys; from dslaunch.launcher.command_line.cli import main\n"
        "try: main(['-q', '-H', 'hosts', '--dry_run', '--no_python', 'true'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(sorted({'locale', 'difflib'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            "chekc",
            "'chekc' is no command, and no script of that name is here; did you mean `dslaunch check`?",
        ),
        ("stack 77", "did you mean `dslaunch stacks`?"),
        ("-np 2 t.py", "there is no option -np: write --num_gpus=N for N processes on each host"),
        ("-n 2 t.py", "there is no option -n: write --num_gpus=N"),
        ("-N 2 t.py", "there is no option -N: write --num_nodes=N"),
        ("-num_gpus=2 t.py", "there is no option -num_gpus; did you mean --num_gpus"),
        ("-M t.py", "there is no option -M; did you mean -m?"),
        ("-~ t.py", "there is no option -~; did you mean --help for the list?"),
    ],
)
def test_what_was_perhaps_meant_is_said(
    words: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_script_that_is_called_almost_like_a_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chekc").touch()
    monkeypatch.setattr(run_job, "run", lambda options: 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chekc"])
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--version", "help all", "exec -- ls", "env train.py", "drop-in status"])
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_2(words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dslaunch", *words.split()],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "no GPU here" not in line]
    assert line.startswith("dslaunch: cannot write to stdout: No space left on device; ")
