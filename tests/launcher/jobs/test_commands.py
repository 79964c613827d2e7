"""What the commands beside running a job have in common."""

from __future__ import annotations

import os
import shlex
from importlib import import_module

import click
import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.options import HOST_OPTIONS


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_has_a_help_with_a_sentence_for_each_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    command: click.Command = import_module(cli.COMMANDS[name], "dslaunch.launcher.command_line").command
    options = [one for one in command.params if isinstance(one, click.Option)]
    assert all(one.help for one in options)
    if name in ("drill", "env", "numerics", "plan"):  # the others are those of a job
        options = [one for one in options if one not in cli.dslaunch.params]
    assert all(f"  {', '.join(one.opts)}" in text for one in options)
    assert text.startswith(f"Usage: dslaunch {name} ")
    assert all(line.isascii() and len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize(
    "name",
    sorted(
        set(cli.COMMANDS)
        - {"jobs", "logs", "attach", "stop", "stacks", "top", "trace", "report"}
        - {"report-env", "checkpoint", "drop-in", "completion", "man", "help"}
    ),
)  # the first ones ask a job that has its hosts, the others are about this machine
def test_a_command_takes_the_options_that_name_hosts(name: str) -> None:
    command: click.Command = import_module(cli.COMMANDS[name], "dslaunch.launcher.command_line").command
    assert set(command.params) >= {*HOST_OPTIONS[:-1]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check --hostfil3 x", "there is no option --hostfil3; did you mean --hostfile?"),
        ("check -H nosuch", "nosuch: this hostfile cannot be read"),
        ("check -H hosts -i node9", "no host is named 'node9'; the hosts are node1"),
        ("check --timeout=0", "'0' is not allowed; give seconds from 1 to 86400"),
        ("check train.py", "takes no more words, and was given train.py"),
        ("exec", "which command? Write: dslaunch exec [options] -- command [its arguments]"),
        (
            "check -H hosts --ssh_identity nokey",
            "--ssh_identity=nokey: there is no such file; give a private key",
        ),
        ("check -H hosts --num_nodes 1:2", "'1:2': only a job has a smallest number of hosts; write e.g. 2"),
        ("stacks", "no job runs here"),
        ("stacks x", "no job 'x' is known here; see `dslaunch jobs`"),
        ("stacks 0", "no job '0' is known here; see `dslaunch jobs`"),
        ("stacks 1", "1: no dslaunch that runs a job has this process id here; `dslaunch jobs` lists them"),
        (
            "report",
            "which run? Write: dslaunch report RUN, with the folder of --log_dir or the name of a job",
        ),
        ("report nosuch", "nosuch: no such file or folder, and no job 'nosuch' is known here; see"),
        ("report ./", ".: there is no events.jsonl and no report.json in it, nor in latest; give the"),
        (
            "report hosts",
            "hosts: no event of a job is in it; give the events.jsonl or the report.json of a run",
        ),
        ("stop", "no job runs here"),
        ("logs", "no job runs here; dslaunch logs JOB takes one that has ended, too"),
        ("attach nosuch", "no job 'nosuch' is known here; see `dslaunch jobs`"),
        ("--name 12 t.py", "'12': the name of a job is 1 to 60 letters, digits,"),
        ("--detach --stdin 0 t.py", "--detach and --stdin=0 exclude each other: a job that outlives the"),
        ("report-env --disk_test 8G", "--disk_test has no effect without --nvme_path, the folder to test"),
        ("report-env --nvme_path . --disk_test 8GB", "'8GB' is no number of bytes; write e.g. 8G"),
        ("report-env --nvme_path . --disk_test 0", "'0' is no number of bytes; write e.g. 8G"),
        ("report-env train.py", "takes no more words, and was given train.py"),
        ("checkpoint", "which command? Write: dslaunch checkpoint ls DIR"),
        ("checkpoint list", "dslaunch checkpoint has no command 'list'; did you mean ls? There are ls,"),
        ("drop-in", "which command? Write: dslaunch drop-in install; there are also uninstall, status"),
        ("drop-in remove", "dslaunch drop-in has no command 'remove'; write install, uninstall, status"),
        ("dropin", "did you mean `dslaunch drop-in`?"),
        ("checkpoint prune out --keep 0", "'0' is not allowed; give a whole number from 1"),
        ("checkpoint ls", "which DIR? Write: dslaunch checkpoint ls DIR"),
        ("checkpoint prune out", "--keep=N is missing; write: dslaunch checkpoint prune DIR --keep=N"),
        ("checkpoint export --dtype int8 out there", "--dtype=int8: must be float32, bfloat16 or float16"),
        ("checkpoint diff --valeus a b", "there is no option --valeus; did you mean --values?"),
        (
            "--metrics_interval 0.01 t.py",
            "--metrics_interval=0.01: must be 0.1 or more, in seconds, or 0 for no",
        ),
        (
            "--metrics_interval 5 --launcher openmpi t.py",
            "--metrics_interval has no effect with --launcher=openmpi, whose ranks have no agent to",
        ),
        ("--events . t.py", "--events=. is a folder; give the name of a file"),
        ("--events missing/file t.py", "--events=missing/file: there is no folder missing"),
        ("--no_ssh --on_end : t.py", "--on_end has no effect with --no_ssh, where each node has a dslaunch"),
        ("--no_ssh --metrics_port 0 t.py", "--metrics_port has no effect with --no_ssh, where no node"),
        ("--launcher=slurm --metrics_port 0 t.py", "--metrics_port has no effect with --launcher=slurm"),
        ("--webhook ftp://x/SECRET t.py", "--webhook: this is no URL of http or https"),
        ("--webhook http://u:p@/SECRET t.py", "--webhook: this is no URL of http or https"),
        ("--webhook http://[::1/SECRET t.py", "--webhook: this is no URL of http or https"),
        ("--webhook http://x:y/SECRET t.py", "--webhook: this is no URL of http or https"),
        ("--metrics_port 99999 t.py", "--metrics_port: '99999' is no port; give one from 1 to 65535, or 0"),
        ("--metrics_port :80 t.py", "':80' is no port"),
        ("--metrics_port a\\ b:80 t.py", "'a b:80' is no port"),
        ("--metrics_port 192.0.2.1:1 t.py", "--metrics_port=192.0.2.1:1: cannot listen there: Cannot assign"),
        ("--events=x --report=./x t.py", "--events=x and --report=./x are the same file; give each its own"),
        ("--trace=0 t.py", "--trace: '0' is not a step or a range of steps; write e.g. 10 or 10-12, where"),
        ("--trace=5-3 t.py", "--trace: '5-3' is an empty range; write 3-5"),
        (
            "--trace_ranks=1 t.py",
            "--trace_ranks has no effect without --trace; add --trace=STEPS, or leave it out",
        ),
        ("--trace=1 --trace_to=.json t.py", "--trace_to=.json: is a folder; give the name of a file"),
        ("--trace=1 --trace_ranks=none t.py", "no rank would be traced; write ranks such as 0,4-7, or all"),
        (
            "--num_gpus=3 --trace=5 --trace_ranks=3 t.py",
            "--trace_ranks: there is no rank 3; the job has 3 ranks: 0-2",
        ),
        (
            "--trace=1 --trace_to=x.gz t.py",
            "--trace_to=x.gz: Perfetto knows the file by its end; let the name",
        ),
        ("--trace=1 --trace_to=x/y.json t.py", "x is no folder, so no trace could be kept"),
        (
            "--launcher=openmpi --num_gpus=1 --trace=1 t.py",
            "so what you gave of --trace has no effect",
        ),
        ("--exec_prefix='podman exec {rank}' t.py", "{rank} stands for nothing"),
        (
            '--exec_prefix="podman \'exec" t.py',
            "a quote or a backslash at its end has nothing that closes it",
        ),
        ("--exec_prefix='A=1 podman' t.py", "it begins with a program; A is set by env NAME=VALUE"),
        ("--exec_prefix='-i podman' t.py", "it begins with a program, and '-i' is an option"),
        ("--exec_prefix=true --stdin=0 t.py", "--stdin=0: rank 0 runs behind exec_prefix"),
        ("--exec_prefix=true --save_pid t.py", "--exec_prefix and --save_pid exclude each other"),
        (
            "--exec_prefix=true --launcher=mpich -H localhost:1 t.py",
            "--exec_prefix and --launcher=mpich exclude each other",
        ),
        ("--launcher=slurm -H boxes t.py", "exec_prefix= of node1 and --launcher=slurm exclude each other"),
        ("exec -H hosts --no_fild -- x", "there is no option --no_fild; did you mean --no_fold"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str,
    message: str,
    tmp_path: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("hosts", "w") as file:
        file.write("node1 slots=1\n")
    with open("boxes", "w") as file:
        file.write("node1 slots=1 exec_prefix='podman exec -i box'\n")
    with open("t.py", "w"):
        os.mkdir(".json")
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(words))
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("dslaunch: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert "SECRET" not in printed.err
