"""What the documents point at is there: files behind relative links, options behind names."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest

from dslaunch.launcher.command_line.cli import COMMANDS, dslaunch

CHECKOUT = Path(__file__).resolve().parents[2]
NEVER_OURS = {".git", ".venv", "build", "dist", "node_modules", "demo-out", ".pytest_cache"}

CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")

# Words that look like options of dslaunch and are another program's.
OTHER_PROGRAMS = {
    "deepspeed": "training scripts",
    "deepspeed_config": "training scripts",
    "local_rank": "training scripts, which get it from the launcher",
    "bin": "python -m dslaunch.drop_in",
    "sh": "python -m dslaunch.drop_in",
    "gpus": "docker",
    "init": "docker",
    "rm": "docker",
    "bind-to": "mpirun of Open MPI",
    "mca": "mpirun of Open MPI",
    "tag-output": "mpirun of Open MPI",
    "weight-transfer-config": "vllm serve",
    "port": "vllm serve",
    **dict.fromkeys(
        (
            "cpus-per-task",
            "exclusive",
            "gpus-per-node",
            "gpus-per-task",
            "job-name",
            "label",
            "nodes",
            "ntasks-per-node",
            "partition",
            "signal",
            "time",
        ),
        "Slurm",
    ),
    **dict.fromkeys(("network", "shm-size", "ulimit"), "docker"),
    **dict.fromkeys(
        ("deepspeed_config_file", "num_machines", "num_processes", "use_deepspeed"), "accelerate"
    ),
    "group": "pip",
    **dict.fromkeys(("bind", "nv"), "apptainer"),
    **dict.fromkeys(("dev-bind", "proc", "unshare-pid"), "bwrap"),
    **dict.fromkeys(("container-image", "container-name", "overlap"), "Slurm"),
    **dict.fromkeys(("ipc",), "docker"),
    "mount-proc": "unshare",
    "rw": "enroot",
    **dict.fromkeys(("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint"), "torchrun"),
    "strict": "mypy",
}
GENERATED = ("docs/reference/", "docs/train/config.md")  # by programs, which break their lines
TWO_SENTENCES = re.compile(r"[a-z)]\. [A-Z][a-z]+ [a-z]")
NOT_THERE_YET: set[str] = set()  # named in the README as missing


def documents() -> list[Path]:
    """Every .md file of the repository: what git knows, or what lies here if this is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return [
            CHECKOUT / name for name in sorted(set(listed.stdout.splitlines())) if (CHECKOUT / name).exists()
        ]
    found = sorted(CHECKOUT.rglob("*.md"))
    return [path for path in found if not NEVER_OURS & set(path.relative_to(CHECKOUT).parts)]


DOCUMENTS = documents()


def test_every_page_can_be_reached_from_the_index_and_the_index_from_the_readme() -> None:
    index = CHECKOUT / "docs" / "README.md"
    assert "docs/README.md" in relative_links((CHECKOUT / "README.md").read_text())
    linked = {(index.parent / link).resolve() for link in relative_links(index.read_text())}
    folders = ("start", "launch", "train", "libraries", "reference", "design")
    pages = {path for folder in folders for path in (index.parent / folder).glob("*.md")}
    assert pages
    assert pages <= linked, sorted(map(str, pages - linked))


def name_of(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def relative_links(text: str) -> list[str]:
    found = [first or second for first, second in LINK.findall(CODE.sub("", text))]
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:|#|//", link)]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ('[a](b.md) and ![c](d/e.png "title")', ["b.md", "d/e.png"]),
        ("[a](b.md#part) [c](#part)", ["b.md#part"]),
        ("[a](https://example.org/b.md) [c](mailto:d@example.org)", []),
        ("`[a](b.md)`\n```\n[c](d.md)\n```\n", []),
        ("[a]: b.md\n", ["b.md"]),
        ("[a](<b.md>)", ["b.md"]),
    ],
)
def test_links_are_found_as_markdown_has_them(text: str, links: list[str]) -> None:
    assert relative_links(text) == links


def test_there_are_documents() -> None:
    assert CHECKOUT / "README.md" in DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    links = relative_links(path.read_text())
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_option_of_dslaunch_in_a_document_exists(path: Path) -> None:
    named = set(OPTION.findall(path.read_text()))
    known = options_of_dslaunch() | options_of_examples() | set(OTHER_PROGRAMS) | NOT_THERE_YET
    assert named - known == set()


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if not name_of(path).startswith(GENERATED)], ids=name_of
)
def test_each_sentence_begins_a_line_outside_of_tables_and_code(path: Path) -> None:
    lines = CODE.sub("", path.read_text()).splitlines()
    prose = [
        re.sub(r"\([^()]*\)", "", line) for line in lines if not line.startswith(("|", "    ", "<", "!"))
    ]
    assert [line for line in prose if TWO_SENTENCES.search(line)] == []


def test_what_the_documents_call_missing_is_missing() -> None:
    assert options_of_dslaunch() & NOT_THERE_YET == set()


def options_of_examples() -> set[str]:
    programs = (CHECKOUT / "docs" / "examples").rglob("*.py")
    return {word for path in programs for word in re.findall(r'add_argument\(\s*"--(\w+)"', path.read_text())}


def options_of_dslaunch() -> set[str]:
    commands = [
        dslaunch,
        *(import_module(name, "dslaunch.launcher.command_line").command for name in COMMANDS.values()),
    ]
    groups = [command for command in commands if isinstance(command, click.Group)]
    commands += [command for group in groups for command in group.commands.values()]
    words = {
        word
        for command in commands
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for word in parameter.opts
    }
    return {word.removeprefix("--") for word in words if word.startswith("--")} | {"help"}
