"""What is kept from being loaded with paramiko, and that no other program notices."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOAD = """
import sys
from dslaunch.launcher.backends.lean_paramiko import lean_paramiko
with lean_paramiko():
    import paramiko
loaded = {"importlib.metadata", "email.message", "invoke"} & sys.modules.keys()
"""


def ran(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
def test_paramiko_is_loaded_without_invoke_and_the_reader_of_package_metadata() -> None:
    assert ran(f"{LOAD}print(loaded)") == "set()"


@pytest.mark.slow
def test_paramiko_knows_its_version_all_the_same() -> None:
    """It is the first thing that it says to sshd."""
    assert (
        ran(
            f"{LOAD}import importlib.metadata as real\n"
            "print(paramiko.__version__ == real.version('paramiko'))"
        )
        == "True"
    )


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["metadata.version('click')", "metadata.distribution('paramiko').version"])
def test_who_asks_for_more_than_that_version_meanwhile_gets_the_real_answer(wanted: str) -> None:
    ask = f"from importlib import metadata; answer = {wanted}"
    program = f"""
from dslaunch.launcher.backends.lean_paramiko import lean_paramiko
with lean_paramiko():
    {ask}
was = answer
{ask}
print(was == answer)
"""
    assert ran(program) == "True"
