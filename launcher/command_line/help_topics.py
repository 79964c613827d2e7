"""The texts about a job's options and the commands, by topic; `dslaunch --help`, `dslaunch help TOPIC` and
`dslaunch man` show them.
"""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """A part of the help; each option of a job names the topic in which it stands. `text` is as an epilog of
    click: a paragraph that begins with \\b keeps its lines.
    """

    name: str
    title: str
    text: str = ""


HOSTS = """
\b
A hostfile has one line per host:
  node1 slots=8
  ada@node2 slots=8 port=2222
It may stand in one word, "node[1-4]:8,gpu7:4", or be read from standard input: -H -

Without -H and /job/hostfile the hosts are those that Slurm, PBS, LSF, Grid Engine, Open MPI, MPICH or the MPI
operator names in the environment; one line says so. An allocation of this machine alone changes nothing.

\b
Examples:
  dslaunch -H hosts --num_nodes 4 train.py
      on the first four hosts of the file `hosts`
  dslaunch -H hosts -i "node1@node2:0,2" train.py
      all slots of node1, and slots 0 and 2 of node2
"""

START = """
Options may be shortened as long as they stay unique, and written with `-` in place of `_`. Everything after
SCRIPT belongs to the script.

\b
Examples:
  dslaunch --no_python ./train.sh
      a program that is no Python script; --local_rank=N is added to its arguments, too
  dslaunch -H hosts --exec_prefix "apptainer exec --nv train.sif" train.py
      inside a container on every host; exec_prefix= in the hostfile is the same for one host
  dslaunch --profile job.yaml --num_nodes 2
      with the options of job.yaml, and --num_nodes 2 in place of what stands there
"""

OUTPUT = """
\b
Examples:
  dslaunch --tee 0 --log_dir logs train.py
      show rank 0 only, and keep the output of all ranks in files
  dslaunch --stack_on_hang 300 train.py
      show where each rank is, if none has written anything for five minutes
  dslaunch --trace 10-12 train.py
      say where the time of these steps went, and keep them for Perfetto in trace-train.json.gz
"""

FAILURES = """
The first rank that fails stops the job on all hosts. The exit code is 0 if every process ended with 0, else
that of the process that failed first (128 + n after signal n), 2 for a mistake in what was given and 3 if a
host could not be used.
"""

DETACH = """
\b
Examples:
  dslaunch --detach -H hosts train.py
      return when all workers run, or with the exit code of a job that failed before; print the job's name
  dslaunch jobs
      the jobs of this user on this machine, those in the foreground too
  dslaunch logs -f train; dslaunch attach train; dslaunch stop train
      follow its output, have its console, end it
  dslaunch top train
      watch its steps, losses, and what each rank does and waits for

A detached job reads nothing, and goes on when the terminal, the login or the command that started it ends.
"""

ELASTIC = """
\b
Examples:
  dslaunch -H hosts --num_nodes 8 --spares 2 --max_restarts 3 train.py
      on eight hosts, with two more to take the place of those that fail
  dslaunch -H hosts --num_nodes 4:8 --max_restarts 3 train.py
      on eight hosts, and after a failure on as many as are left, if these are four, until others are back
  dslaunch -H hosts --num_nodes 4:8 --notice_file /run/maintenance train.py
      the same, and a host where that file is there is left at the next checkpoint
"""

ROLES = """
A job may have servers beside its trainers, e.g. to generate while it trains. The first failure of either
stops all; when the trainers have ended well, the servers are ended. Each process has the hosts of each role
in its environment: DSLAUNCH_HOSTS_TRAINER, DSLAUNCH_HOSTS_ROLLOUT.

\b
Examples:
  dslaunch -H hosts --role rollout=node5 "vllm serve model --port 8000" train.py
      train.py on all hosts but node5, and the server there
  dslaunch -H hosts --role rollout=node[5-6] ./serve.sh --role_health rollout=8000 train.py
      two servers; train.py starts when both answer on port 8000
  dslaunch -H hosts --role rollout ./serve.sh --role_restarts rollout=3 train.py
      on the hosts with role=rollout in the hostfile; one that ends is started again, three times at most
"""

FILES = """
For hosts that share no folder with this one. What a host has already is not sent, and many hosts take it from
each other. Files that were changed on a host are named, and nothing starts, unless --sync_force is there.

\b
Examples:
  dslaunch -H hosts --sync . train.py
      bring the current folder to every host, then start
  dslaunch -H hosts --sync . --collect "out/**" --collect "*.log" train.py
      and bring back what the job wrote, into collected/HOST
"""

LAUNCHERS = """
\b
Examples:
  dslaunch -H hosts --launcher slurm train.py
      by srun, inside an allocation
  dslaunch -H hosts --no_ssh --node_rank 1 train.py
      the part of the second host; the same command with other ranks runs on the others
"""

TOPICS = (
    Topic("hosts", "Hosts and slots", HOSTS),
    Topic("start", "The program and its start", START),
    Topic("output", "Output", OUTPUT),
    Topic("failures", "Failures and restarts", FAILURES),
    Topic("detach", "Jobs that outlive the terminal", DETACH),
    Topic("elastic", "Elastic jobs: other hosts after a failure, and while they run", ELASTIC),
    Topic("roles", "Roles: servers beside the trainers", ROLES),
    Topic("files", "Files where nothing is shared", FILES),
    Topic("launchers", "Other launchers, and no SSH", LAUNCHERS),
    Topic("deepspeed", "DeepSpeed's spellings"),
    Topic("information", "Information"),
)

# The first page shows only these, so that it fits on a screen.
FIRST_PAGE = {
    "What most jobs need": (
        *("hostfile", "include", "num_nodes", "num_gpus", "module"),
        *("log_dir", "max_restarts", "dry_run", "version", "help"),
    )
}

# The summary of each command, in the order of the first page: one line of 80 columns at most. The line of
# `dslaunch help` comes after them.
COMMANDS = {
    "check": "what is missing or differs on the hosts, and who reaches whom",
    "exec": "a command once on every host, equal output shown once",
    "env": "the variables that each rank would get, and where they come from",
    "plan": "will this job fit? memory of GPUs and hosts, without any of them",
    "drill": "make faults in a run: how long until it trains again?",
    "jobs": "your jobs on this machine, how far each is, and its last line",
    "logs": "what a detached job has shown so far, of some ranks or all",
    "attach": "the console of a detached job; Ctrl-C asks what to do",
    "stop": "end a job in order, or kill it, and wait until it has ended",
    "stacks": "what each rank of a job that runs does, as seen by Python",
    "top": "watch a job: steps, losses, and what each rank waits for",
    "trace": "print again where the time of traced steps went",
    "numerics": "is a training right? compare its first steps with torch alone",
    "report": "a page on a run for a browser: curves, times, failures",
    "checkpoint": "look at checkpoints, verify, compare, prune, export weights",
    "report-env": "what works on this machine: kernels, CUDA, direct I/O",
    "drop-in": "make `import deepspeed` get dslaunch in every program",
    "completion": "what makes bash, zsh or fish complete a command line",
    "man": "the manual page, for `man -l -`",
}
