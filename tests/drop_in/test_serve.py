"""What a program is told that asks the package for what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dslaunch import drop_in

PROGRAM = """
import json, sys
import deepspeed
said = {}
for code in sys.argv[1:]:
    try:
        exec(code)
        said[code] = ["", ""]
    except Exception as error:
        said[code] = [type(error).__name__, str(error)]
names = ("DeepSpeedHybridEngine", "model_implementations", "no_such_name")
said["has"] = [hasattr(deepspeed, name) for name in names]
print(json.dumps(said))
"""
PIPES = (
    'is not in dslaunch: is how DeepSpeed runs a batch; see "Pipelines" in docs/reference/compatibility.md'
)
LINEAR = 'has layers with quantized or sharded bases; see "Compression and quantization" in docs/reference/'
UNKNOWN = (
    "of dslaunch has no attribute 'no_such_name'; DeepSpeed's names are listed in "
    "docs/reference/compatibility.md"
)
CASES = {  # in this order, in one process
    "deepspeed.zero.partition_parameters.ZeroParamStatus.AVAILABLE": ("", ""),  # before it is imported
    "from deepspeed import PipelineModule": ("", ""),
    "deepspeed.PipelineModule": ("", ""),
    "from deepspeed import pipe": ("", ""),
    "import deepspeed.pipe": ("", ""),
    "import deepspeed; isinstance(3, deepspeed.pipe.PipelineModule)": ("", ""),
    "from deepspeed.runtime.pipe.schedule import TrainSchedule; TrainSchedule(4, 2, 0)": (
        "NotImplementedError",
        f"deepspeed.runtime.pipe.schedule.TrainSchedule {PIPES}",
    ),
    "import deepspeed.runtime.pipe.schedule as one; getattr(one, 'TrainSchedule')": (
        "AttributeError",
        f"deepspeed.runtime.pipe.schedule.TrainSchedule {PIPES}",
    ),
    "from deepspeed.moe.layer import MoE": ("", ""),
    "from deepspeed.linear import LoRAConfig; LoRAConfig(3)": (
        "NotImplementedError",
        f"deepspeed.linear.LoRAConfig is not in dslaunch: {LINEAR}compatibility.md",
    ),
    "from deepspeed import no_such_name": ("ImportError", f"module 'deepspeed' {UNKNOWN}"),
    "deepspeed.no_such_name": ("AttributeError", f"module 'deepspeed' {UNKNOWN}"),
    "import deepspeed.no_such_module": ("ModuleNotFoundError", "No module named 'deepspeed.no_such_module'"),
    "import deepspeed.moe.no_such_module": (
        "ModuleNotFoundError",
        "No module named 'deepspeed.moe.no_such_module'",
    ),
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES": ("", ""),
    "from deepspeed.utils.zero_to_fp32 import *": ("", ""),
}


@pytest.fixture(scope="module")
def said() -> dict[str, list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *CASES],
        env={**os.environ, "PYTHONPATH": drop_in.FOLDER},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("code", CASES)
def test_what_is_not_there_says_why_and_where_to_read_on(said: dict[str, list[object]], code: str) -> None:
    assert tuple(said[code]) == CASES[code]


@pytest.mark.slow
def test_who_asks_whether_it_is_there_is_told_no(said: dict[str, list[object]]) -> None:
    assert said["has"] == [False, False, False]
