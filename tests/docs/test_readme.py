"""The program of the README runs as it is printed there."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.ranks import Ranks

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
DEEPSPEED = Path(sys.prefix) / "deepspeed"  # where `make setup` puts it, and nothing imports it by accident
MOST_LINES = 200


def run_program(rank: int, program: str, folder: str) -> str:
    before, said = os.getcwd(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(said):
            exec(program, {})
    finally:
        os.chdir(before)
    return said.getvalue()


def test_the_program_trains_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    text = README[README.index("## Train") :]
    (program,) = re.findall(r"`train\.py`[^\n]*:\n\n<!-- run by[^\n]*\n```python\n(.*?)```", text, re.DOTALL)
    said, nothing = ranks(run_program, program, str(tmp_path), world_size=2)
    (loss,) = re.findall(r"^loss ([0-9.]+) after 64 steps$", said, re.MULTILINE)
    assert not nothing
    assert float(loss) < 0.5  # ln 2 at the start
    assert (tmp_path / "checkpoints" / "latest").is_file()


def source(package: str, file: str) -> str:
    """A file of another tool that is installed here, which is not imported."""
    found = None if package == "deepspeed" else find_spec(package)
    folder = Path(found.origin).parent if found is not None and found.origin else DEEPSPEED / package
    if not (folder / file).is_file():
        pytest.skip(f"no {package} here")
    return (folder / file).read_text()


def row(said: str) -> list[str]:
    """What the table says in this row of dslaunch, torchrun, Accelerate, FSDP2, DeepSpeed."""
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {said} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_table_says_which_hosts_another_tool_goes_on_with() -> None:
    _, torchrun, accelerate, _, deepspeed = row("goes on with fewer hosts")
    assert torchrun.startswith("yes")
    assert "<minimum_nodes>:<maximum_nodes>" in source("torch", "distributed/run.py")
    assert accelerate.startswith("no")
    assert "args.nnodes = str(num_machines)" in source("accelerate", "utils/launch.py")
    assert deepspeed == "no"
    assert not any("elastic" in source("deepspeed", f"launcher/{name}.py") for name in ("runner", "launch"))


def test_the_table_says_where_another_tool_offloads_to() -> None:
    *_, fsdp2, deepspeed = row("offload to host memory, to NVMe")
    assert (fsdp2, deepspeed) == ("yes, no", "yes, yes")
    policies = source("torch", "distributed/fsdp/_fully_shard/_fsdp_api.py")
    assert re.findall(r"class (\w+)\(OffloadPolicy\)", policies) == ["CPUOffloadPolicy"]
    assert 'nvme = "nvme"' in source("deepspeed", "runtime/zero/offload_config.py")


def test_the_table_says_on_what_another_tool_runs_and_what_it_loads() -> None:
    assert row("runs on other accelerators")[1:] == ["yes"] * 4
    assert "MULTI_NPU" in source("accelerate", "utils/dataclasses.py")
    assert "class NPU_Accelerator" in source("deepspeed", "accelerator/npu_accelerator.py")
    assert "_get_device_handle(mesh.device_type)" in source(
        "torch", "distributed/fsdp/_fully_shard/_fsdp_init.py"
    )
    assert row("other number of ranks loads a checkpoint as it is")[-1] == "after a conversion"
    assert "Automatic adjustment" in source("deepspeed", "runtime/engine.py")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        ("64 hosts in 2.33 s, where pdsh takes 3.97 s", ["| 64 | 2.33 |  | 3.97 |"]),
        ("16 hosts in 0.69 s, where DeepSpeed takes 15.7 s", ["| 16 | 0.69 | 15.75 |"]),
        (
            "0.53 to 0.96 of DeepSpeed's time and 0.56 to 0.92 of FSDP2's",
            [
                "| comm-bound | 2 | dslaunch 3 | DeepSpeed 3 | 0.53 |",
                "| comm-bound | 2 | dslaunch 3 | FSDP2 | 0.56 |",
                "| compute-bound | 2 | dslaunch 3 | FSDP2 | 0.92 |",
                "| compute-bound | 2 | dslaunch 3 | DeepSpeed 3 | 0.96 |",
            ],
        ),
        ("0.73 to 0.96 of DeepSpeed's at stages 2 and 3", ["469 / 647 = 0.73", "654 / 683 = 0.96"]),
        ("1 GB in 0.56 s, where DeepSpeed takes 1.51 s", ["| dslaunch 2 | 0.56 |", "| DeepSpeed 2 | 1.51 |"]),
        ("and FSDP2 1.89 s", ["| FSDP2 | 1.89 |"]),
        ("1.34 s, where DeepSpeed first converts for 11.05 s", ["nothing | 1.34 |", "11.05 s of conversion"]),
        ("in 14 ms instead of 1.3 s", ["| import deepspeed | 13.6 | 1331.5 |"]),
        ("DeepSpeed's within 1e-6", ["| 9.5e-07 |"]),
        ("delays a step by 0.22 s for 1 GB", ["0.220 | 0.97 | 13 |"]),
    ],
)
def test_every_figure_stands_in_the_benchmarks(said: str, rows: list[str]) -> None:
    assert said in " ".join(README.split())
    text = BENCHMARKS.read_text()
    assert [row for row in rows if row not in text] == []
