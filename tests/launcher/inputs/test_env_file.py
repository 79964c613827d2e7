from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.env_file import EnvEntry, expand, exported, parse_env_file

ROOT = Path(__file__).parents[3]
NODE = {"HOME": "/root", "A": "1", "B_2": "two words", "Q": "it's"}


def values(text: str) -> list[tuple[str, tuple[str, ...]]]:
    entries = parse_env_file(text.encode("utf-8", "surrogateescape"), source="env")
    return [(entry.name, entry.value) for entry in entries]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("K=v", "K"),
        ("  K  =  v  ", "K"),
        ("\tK\t=\tv\t", "K"),
        ("export K=v", "K"),
        ("  export \t K = v", "K"),
        ("export=v", "export"),
        ("export = v", "export"),
        ("_k9=v", "_k9"),
        ("\n\n  \t\nK=v\n\n", "K"),
        ("# comment\n   # C=1\n#c=1\nK=v", "K"),
        ("K=v\r\n", "K"),
        ("\r\n# c\r\nK=v\r\n\r\n", "K"),
        ("\ufeffK=v", "K"),
    ],
)
def test_a_line_names_one_variable(text: str, name: str) -> None:
    assert values(text) == [(name, ("v",))]


RAW = [
    ("", ("",)),
    ("  ", ("",)),
    ("a=b=c", ("a=b=c",)),
    ("a b", ("a b",)),
    ("64(x2)", ("64(x2)",)),
    ("a;b", ("a;b",)),
    ("it's", ("it's",)),
    ('say "hi"', ('say "hi"',)),
    ('{"a": 1}', ('{"a": 1}',)),
    ("# not a comment", ("# not a comment",)),
    ("INFO # neither", ("INFO # neither",)),
    ("`id`", ("`id`",)),
    ("$(id)", ("$(id)",)),
    ("$", ("$",)),
    ("a$ $1 $$ $?", ("a$ $1 $$ $?",)),
    (r"C:\dir\n\\x", (r"C:\dir\n\\x",)),
    (r"\$A", ("$A",)),
    (r"\${A}", ("${A}",)),
    (r"\$(id)", ("$(id)",)),
    (r"\\$A", (r"\$A",)),
    ("~/x", ("~/x",)),
    ("$A", ("", "A", "")),
    ("${A}", ("", "A", "")),
    ("$A$B_2", ("", "A", "", "B_2", "")),
    ("${A}b$B_2/c", ("", "A", "b", "B_2", "/c")),
    ("$A.b", ("", "A", ".b")),
    ("$LD_LIBRARY_PATH:/x", ("", "LD_LIBRARY_PATH", ":/x")),
    ('"a" b', ('"a" b',)),
    ("'a' 'b'", ("'a' 'b'",)),
    ('"$A"/x', ('"', "A", '"/x')),
    ("'a' # c", ("'a' # c",)),
    ("\u00a0x\u2003", ("\u00a0x\u2003",)),
    ("caf\u00e9 \udcff", ("caf\u00e9 \udcff",)),
    ("a\rb", ("a\rb",)),
]


@pytest.mark.parametrize(("text", "value"), RAW)
def test_a_raw_value_is_its_line_with_variables(text: str, value: tuple[str, ...]) -> None:
    assert values(f"K={text}\nL=1") == [("K", value), ("L", ("1",))]


QUOTED = [
    ("''", ("",)),
    ('""', ("",)),
    ("'q v'", ("q v",)),
    ('"q v"', ("q v",)),
    ("' a '", (" a ",)),
    ("'$A ${A} `id` $(id)'", ("$A ${A} `id` $(id)",)),
    (r"'\$A \\ \"'", (r"\$A \\ \"",)),
    ("""'it'"'"'s'""", ("it's",)),
    ('"$A"', ("", "A", "")),
    ('"a ${A}b $B_2"', ("a ", "A", "b ", "B_2", "")),
    (r'"\$A \${A}"', ("$A ${A}",)),
    (r'"\\$A"', ("\\", "A", "")),
    (r'"say \"hi\""', ('say "hi"',)),
    (r'"\\ \` \n \x"', (r"\ ` \n \x",)),
    ('"$A"\'$A\'"$A"', ("", "A", "$A", "A", "")),
    ('"$ a$"', ("$ a$",)),
    ("'a\nb'", ("a\nb",)),
    ('"a\n$A\n\nb"', ("a\n", "A", "\n\nb")),
    ("""'it'"'"'s\n# two\nK=lines'""", ("it's\n# two\nK=lines",)),
    ("'a\r\nb\r'", ("a\r\nb\r",)),
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "  \t\n"])
@pytest.mark.parametrize(("text", "value"), QUOTED)
def test_a_value_of_quoted_pieces_loses_its_quotes(text: str, value: tuple[str, ...], end: str) -> None:
    assert values(f"K={text}{end}L=1{end}") == [("K", value), ("L", ("1",))]


@pytest.mark.parametrize("text", [text for text, _ in QUOTED])
def test_a_quoted_value_means_what_a_shell_makes_of_it(text: str) -> None:
    # Bytes, because text mode would turn '\r\n' into '\n'.
    shell = subprocess.run(["/bin/sh", "-c", f"printf %s {text}"], env=NODE, capture_output=True, check=True)
    assert expand(parse_env_file(f"K={text}".encode(), source="env"), NODE)["K"].encode() == shell.stdout


UNCLOSED = "is opened and not closed; end the value with it, or, if it is part of the value, write"
NAME = "a variable's name holds letters, digits and '_', and does not begin with a digit"
BRACE = (
    "after '${' only a variable's name and '}' may follow; write e.g. '${HOME}', or "
    "'\\${' for the text itself"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("K", "a line without '='; allowed is NAME=value; write e.g. 'NCCL_DEBUG=INFO'"),
        ("export K", "a line without '='; allowed is NAME=value; write e.g. 'NCCL_DEBUG=INFO'"),
        ("=v", f"'': {NAME}; write e.g. 'NCCL_DEBUG=INFO'"),
        ("NCCL-DEBUG=INFO", f"'NCCL-DEBUG': {NAME}; did you mean 'NCCL_DEBUG'?"),
        ("PATH+=:/x", f"'PATH+': {NAME}; did you mean 'PATH'?"),
        ("a b=1", f"'a b': {NAME}; did you mean 'a_b'?"),
        ("1K=v", f"'1K': {NAME}; write e.g. 'NCCL_DEBUG=INFO'"),
        ("caf\u00e9=v", f"'caf\u00e9': {NAME}; did you mean 'caf'?"),
        ("\udcff=v", f"'\\udcff': {NAME}; write e.g. 'NCCL_DEBUG=INFO'"),
        ("-" * 50 + "=v", f"'{'-' * 40}...': {NAME}; write e.g. 'NCCL_DEBUG=INFO'"),
        ("K='secret\nL=1\n", f"K: the quote ' {UNCLOSED} K=\"'\""),
        ('K="secret\\"', f"K: the quote \" {UNCLOSED} K='\"'"),
        ("K='a''b", f"K: the quote ' {UNCLOSED} K=\"'\""),
        (
            "K='secret\nmore' tail",
            "K: text follows the quote that closes on a later line; a value of several lines is quoted to "
            "its end; move the text inside the quotes",
        ),
        ("K=a${A", f"K: {BRACE}"),
        ("K=${}", f"K: {BRACE}"),
        ("K=${A:-secret}", f"K: {BRACE}"),
        ('K="${A:+:$A}"', f"K: {BRACE}"),
        ("K=a\0b", "a NUL byte; a variable holds any byte but NUL; remove it"),
    ],
)
def test_a_bad_line_is_refused_at_its_place_without_its_value(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        values(f"FIRST='two\nlines'\n{text}")
    assert str(caught.value) == f"env:3: {message}"
    assert caught.value.exit_code == EXIT_MISTAKE


def test_every_entry_knows_its_line() -> None:
    entries = parse_env_file(b"A=1\n\nB='x\ny\n'\nA=2\n", source="/home/ada/.deepspeed_env")
    assert entries == (
        EnvEntry(name="A", value=("1",), source="/home/ada/.deepspeed_env:1"),
        EnvEntry(name="B", value=("x\ny\n",), source="/home/ada/.deepspeed_env:3"),
        EnvEntry(name="A", value=("2",), source="/home/ada/.deepspeed_env:6"),
    )


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("A=2", {"A": "2"}),
        ("C=$A", {"C": "1"}),
        ("C=$UNSET.", {"C": "."}),
        ("A=2\nC=$A", {"A": "2", "C": "2"}),
        ("C=$A\nA=2", {"A": "2", "C": "1"}),
        ("A=x:$A\nA=y:$A", {"A": "y:x:1"}),
        ("C='$A'\nD=$C", {"C": "$A", "D": "$A"}),
        ('C=$Q\nD="$C $B_2"', {"C": "it's", "D": "it's two words"}),
    ],
)
def test_the_node_applies_entries_in_order(text: str, changes: dict[str, str]) -> None:
    assert expand(parse_env_file(text.encode(), source="env"), NODE) == {**NODE, **changes}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    home.mkdir()
    cwd.mkdir()
    return home, cwd


def exports(
    folders: tuple[Path, Path], file_name: str | None = None
) -> list[tuple[str, tuple[str, ...], str]]:
    """What the files add to the one variable that is always there."""
    home, cwd = folders
    first, *entries = exported({}, cwd=str(cwd), home=home, file_name=file_name)
    assert first.name == "PYTHONPATH"
    return [(entry.name, entry.value, entry.source) for entry in entries]


def test_the_shell_gives_what_its_prefixes_select(folders: tuple[Path, Path]) -> None:
    taken = {
        "AZUREML_RUN_ID": "r",
        "DSLAUNCH_LOG_LEVEL": "info",
        "DLTS_JOB_ID": "j",
        "MASTER_HOST": "m",
        "MLFLOW_TRACKING_URI": "u",
        "MV2_USE_CUDA": "1",
        "NCCL_DEBUG": "$HOME is literal \udcff",
        "NCCL_IB_HCA": "mlx5",
        "PYTHONUNBUFFERED": "1",
        "UCX_NET_DEVICES": "eth0",
    }
    left = {"HOME": "/root", "PATH": "/bin", "MY_NCCL_DEBUG": "1", "nccl_debug": "1", "AISC_JOB_NAME": "x"}
    home, cwd = folders
    environ = {**left, **taken, "PYTHONPATH": "/old:/older"}
    expected = {**taken, "PYTHONPATH": f"{cwd}:/old:/older"}
    sources = {"PYTHONPATH": "the working folder, then the shell"}
    assert exported(environ, cwd=str(cwd), home=home, file_name=None) == tuple(
        EnvEntry(name=name, value=(expected[name],), source=sources.get(name, "the shell"))
        for name in sorted(expected)
    )


@pytest.mark.parametrize("environ", [{}, {"PYTHONPATH": ""}])
def test_the_folder_is_always_on_the_python_path(folders: tuple[Path, Path], environ: dict[str, str]) -> None:
    home, cwd = folders
    assert exported(environ, cwd=str(cwd), home=home, file_name=None) == (
        EnvEntry(name="PYTHONPATH", value=(str(cwd),), source="the working folder"),
    )


def test_the_home_file_comes_before_the_one_here(folders: tuple[Path, Path]) -> None:
    home, cwd = folders
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (cwd / ".deepspeed_env").write_text("A=$A,here\n")
    assert exports(folders) == [
        ("A", ("home",), f"{home}/.deepspeed_env:1"),
        ("B", ("home",), f"{home}/.deepspeed_env:2"),
        ("A", ("", "A", ",here"), f"{cwd}/.deepspeed_env:1"),
    ]


def test_a_file_in_one_of_the_folders_is_enough(folders: tuple[Path, Path]) -> None:
    home, cwd = folders
    (home / "mine").write_text("A=home")
    (cwd / ".deepspeed_env").write_text("not read")
    assert exports(folders, file_name="mine") == [("A", ("home",), f"{home}/mine:1")]


@pytest.mark.parametrize("way", ["absolute", "same folder", "linked folder", "linked file"])
def test_one_file_is_read_once(folders: tuple[Path, Path], way: str) -> None:
    home, cwd = folders
    file = cwd / ".deepspeed_env"
    file.write_text("A=x:$A")
    if way == "linked folder":
        home = home / "link"
        home.symlink_to(cwd)
    elif way == "linked file":
        (home / file.name).symlink_to(file)
    elif way == "same folder":
        home = cwd
    file_name = str(file) if way == "absolute" else None
    assert exports((home, cwd), file_name=file_name) == [("A", ("x:", "A", ""), f"{file}:1")]


def test_a_named_file_that_is_nowhere_is_refused(folders: tuple[Path, Path]) -> None:
    home, cwd = folders
    with pytest.raises(LaunchError) as caught:
        exports(folders, file_name="mine")
    assert str(caught.value) == (
        f"DS_ENV_FILE='mine': there is no {home}/mine or {cwd}/mine; "
        "create the file, or unset DS_ENV_FILE to read .deepspeed_env"
    )
    with pytest.raises(LaunchError, match=re.escape("there is no /no/such; create")):
        exports(folders, file_name="/no/such")


def test_a_link_to_a_file_that_is_gone_is_not_taken_for_no_file(folders: tuple[Path, Path]) -> None:
    home, _ = folders
    (home / ".deepspeed_env").symlink_to("/no/such")
    with pytest.raises(LaunchError) as caught:
        exports(folders)
    assert str(caught.value) == (
        f"{home}/.deepspeed_env: this environment file is a link to /no/such, which is not there; repair the "
        "link, or remove it"
    )


def test_an_empty_file_name_is_not_given(folders: tuple[Path, Path]) -> None:
    assert exports(folders, file_name="") == []


def test_a_file_that_cannot_be_read_is_refused(folders: tuple[Path, Path]) -> None:
    path = folders[0] / ".deepspeed_env"
    path.mkdir()
    with pytest.raises(LaunchError) as caught:
        exports(folders)
    assert str(caught.value) == (
        f"{path}: this environment file cannot be read (Is a directory); make it a "
        "readable file, or remove it"
    )


def test_the_file_in_the_guide_is_read() -> None:
    (block,) = re.findall(r"```env\n(.*?)```", (ROOT / "docs/launch/hostfile.md").read_text(), re.DOTALL)
    assert expand(parse_env_file(block.encode(), source="guide"), {"HOME": "/root"}) == {
        "HOME": "/root",
        "NCCL_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/data/hf",
        "LD_LIBRARY_PATH": "/opt/lib:",
        "OPTIONS": '{"a": 1}; it\'s (raw)',
        "QUOTED": "nothing expands: $HOME",
        "EXPANDED": "in /root, two\nlines",
    }


_value_bytes = st.binary().map(lambda data: data.replace(b"\0", b"")) | st.text(
    alphabet="'\"\\$`{}()#=\r\n \tA\u00e9\ufeff"
).map(str.encode)


@given(st.lists(_value_bytes))
def test_any_bytes_quoted_by_shlex_come_back(data: list[bytes]) -> None:
    quoted = (shlex.quote(os.fsdecode(value)) for value in data)
    text = "".join(f"K{place}={value}\n" for place, value in enumerate(quoted))
    entries = parse_env_file(os.fsencode(text), source="env")
    environ = expand(entries, {"A": "must not be seen"})
    assert [os.fsencode(environ[f"K{place}"]) for place in range(len(data))] == data


@given(st.text(alphabet=st.characters(exclude_characters="\0\n$")))
def test_any_raw_text_without_dollars_comes_back_stripped(text: str) -> None:
    stripped = text.strip(" \t\r")
    data = f"K={text}\n".encode("utf-8", "surrogatepass")
    if stripped[:1] not in ("'", '"'):
        assert expand(parse_env_file(data, source="env"), {}) == {
            "K": data[2:].strip(b" \t\r\n").decode("utf-8", "surrogateescape")
        }


_pieces = st.sampled_from(
    [b"K", b"=", b"'", b'"', b"\\", b"$", b"{", b"}", b"\n", b"\r", b" ", b"#", b"export "]
)


@given(st.lists(_pieces | st.binary(max_size=2)).map(b"".join))
def test_any_file_is_read_or_refused(data: bytes) -> None:
    try:
        entries = parse_env_file(data, source="env")
    except LaunchError:
        return
    for entry in entries:
        assert entry.name.isidentifier()
        assert len(entry.value) % 2 == 1
        assert all(part.isidentifier() for part in entry.value[1::2])
