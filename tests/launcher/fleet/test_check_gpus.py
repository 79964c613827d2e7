"""What `dslaunch check` asks NVML and says of the answers. NVML itself is a record of its answers."""

from __future__ import annotations

import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.fleet.check_facts import HostFacts, read_answer
from dslaunch.launcher.fleet.check_summary import summary_of
from dslaunch.launcher.node.observe.inspection import answer
from tests.launcher.fleet.test_check_summary import answers, cluster, host, texts

FAKE = Path(__file__).parents[1] / "fake_nvml"
H100X8: dict[str, Any] = json.loads((FAKE / "h100x8.json").read_text())
ALL_UP = [1] * 18


def asked(record: dict[str, Any] | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answer of a host on which NVML answers so; None for a host without pynvml."""
    (folder / "record.json").write_text(json.dumps(record))
    monkeypatch.setenv("FAKE_NVML", str(folder / "record.json"))
    monkeypatch.setenv("PYTHONPATH", str(FAKE) if record is not None else "")
    program = pkgutil.get_data("dslaunch.launcher.fleet", "nvml_program.py")
    assert program is not None
    facts = answer("nvml", {"python": sys.executable, "program": program.decode(), "timeout_s": 20.0}).facts
    found, why = read_answer("nvml", facts)
    assert found is not None, why
    return found


def gpus(**changed: dict[str, Any]) -> dict[str, Any]:
    """The answer of a host with 8 GPUs, with something changed on some of them: gpu3={...}."""
    good = {
        "problem": "", "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984, "ecc_errors": 0,
        "throttling": 1, "pcie_generation": 5, "max_pcie_generation": 5, "pcie_width": 16,
        "max_pcie_width": 16, "num_nvlinks": 18, "num_nvlinks_up": 18,
    }  # fmt: skip
    found = [{"index": index, **good, **changed.get(f"gpu{index}", {})} for index in range(8)]
    return {"problem": "", "cuda": 12040, "gpus": found}


def host_with(place: int, nvml: dict[str, Any], **changed: dict[str, Any]) -> HostFacts:
    return host(place, answers={**answers(**changed), "nvml": nvml})


def test_nvml_is_asked_by_the_host_s_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {
        **H100X8,
        "gpu": {
            "1": {"nvmlDeviceGetTotalEccErrors": {"error": 3}, "nvmlDeviceGetName": "OLD"},
            "2": {"nvmlDeviceGetHandleByIndex": {"error": 4}},  # given to others
            "3": {"nvmlDeviceGetHandleByIndex": {"error": 15}},
            "4": {"nvmlDeviceGetNvLinkState": [1, 0, 1, 1]},
        },
    }
    found = asked(record, tmp_path, monkeypatch)
    wanted = gpus(
        gpu1={"ecc_errors": -1, "name": "OLD"},
        gpu3={"problem": "GPU is lost", "name": "", "num_nvlinks": 0, "num_nvlinks_up": 0,
              **dict.fromkeys(("memory_bytes", "ecc_errors", "throttling", "pcie_generation",
                               "max_pcie_generation", "pcie_width", "max_pcie_width"), -1)},
        gpu4={"num_nvlinks": 4, "num_nvlinks_up": 3},
    )  # fmt: skip
    del wanted["gpus"][2]
    assert found == wanted


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (None, "no pynvml"),
        ({**H100X8, "nvmlInit": {"error": 12}}, "no NVML library"),
        ({**H100X8, "nvmlInit": {"error": 18}}, "Driver/library version mismatch"),
    ],
)
def test_a_host_on_which_nvml_says_nothing(
    record: dict[str, Any] | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(record, tmp_path, monkeypatch) == {"problem": problem, "cuda": -1, "gpus": []}


def test_gpus_without_fault_have_their_rows_and_no_finding() -> None:
    summary = summary_of(cluster(host_with(0, gpus()), host_with(1, gpus())))
    assert summary.findings == ()
    rows = {row.label: row.values[0][0] for row in summary.rows if row.is_same}
    shown = {
        "driver's CUDA": "12.4",
        "GPU memory": "8 x 80 GiB",
        "GPU PCIe": "8 x gen 5 x16",
        "NVLinks": "8 x 18 of 18 up",
        "ECC errors": "none",
        "throttling": "none",
        "NCCL": "2.21.5",
    }
    assert rows.items() >= shown.items()


@pytest.mark.parametrize(
    ("nvml", "text"),
    [
        (gpus(gpu3={"ecc_errors": 2}), "GPU 3: 2 uncorrected memory errors (ECC) since the driver was"),
        (gpus(gpu0={"throttling": 0x48}, gpu1={"throttling": 0x48}),
         "GPU 0-1: clocks are lowered by heat; look"),
        (gpus(gpu7={"throttling": 0xA1}),
         "GPU 7: clocks are lowered by heat (limited by the driver) and the"),
        (gpus(gpu7={"throttling": 0x08}), "GPU 7: clocks are lowered by the hardware; look at the cooling"),
        (gpus(gpu2={"pcie_width": 8}, gpu5={"pcie_width": 8}),
         "GPU 2,5: a PCIe link of x8 where x16 is possible; seat the card"),
        (gpus(gpu6={"num_nvlinks_up": 17}), "GPU 6: 17 NVLinks are up, of 18; look at nvidia-smi nvlink"),
        (gpus(gpu6={"memory_bytes": 40 << 30}), "GPU 6: 40 GiB of memory, where most GPUs have 80 GiB; the"),
        ({**gpus(), "gpus": [], "problem": "Driver/library version mismatch"},
         "NVML does not answer: Driver/library version mismatch; look at nvidia-smi"),
    ],
)  # fmt: skip
def test_a_fault_of_a_gpu_is_named_with_host_and_number(nvml: dict[str, Any], text: str) -> None:
    summary = summary_of(cluster(host_with(0, gpus()), host_with(1, nvml), host_with(2, gpus())))
    ((name, said),) = texts(summary, are_problems=False)
    assert name == "node2"
    assert said.startswith(text)
    assert summary.exit_code == 0


def test_a_gpu_that_is_lost_keeps_its_host_from_being_used() -> None:
    lost = gpus(gpu3={"problem": "GPU is lost", "name": "", "memory_bytes": -1, "num_nvlinks": 0,
                      "num_nvlinks_up": 0, "pcie_width": -1, "ecc_errors": -1, "throttling": -1})  # fmt: skip
    summary = summary_of(cluster(host_with(0, gpus()), host_with(1, lost)))
    ((name, said),) = texts(summary, are_problems=True)
    assert (name, texts(summary, are_problems=False)) == ("node2", [])
    assert said.startswith("GPU 3 cannot be used: GPU is lost; look for it in the kernel's log (Xid)")


@pytest.mark.parametrize(
    "nvml",
    [
        gpus(**{f"gpu{index}": {"num_nvlinks_up": 0} for index in range(8)}),  # cards without bridges
        gpus(gpu1={"pcie_generation": 1}),  # idle
        gpus(gpu1={"throttling": 0x7}),  # idle, clocks that were set, a power cap
        gpus(gpu1={"throttling": -1, "ecc_errors": -1, "pcie_width": -1, "memory_bytes": -1}),
    ],
)
def test_what_is_no_fault_of_a_gpu(nvml: dict[str, Any]) -> None:
    assert summary_of(cluster(host_with(0, nvml), host_with(1, nvml))).findings == ()


@pytest.mark.parametrize(
    ("changed", "row"),
    [
        ({}, "no pynvml; for more about GPUs: /opt/py/bin/python -m pip install nvidia-ml-py"),
        ({"gpu": {"driver": "", "names": [], "num": 0}}, None),  # no NVIDIA GPU
    ],
)
def test_how_to_get_nvml_is_said_where_there_are_gpus(changed: dict[str, Any], row: str | None) -> None:
    nothing = {"problem": "no pynvml", "cuda": -1, "gpus": []}
    summary = summary_of(cluster(host_with(0, nothing, **changed)))
    assert summary.findings == ()
    assert [one.values[0][0] for one in summary.rows if one.label == "NVML"] == ([row] if row else [])
