"""What lies on a local disk: how much memory it saves, what the disk may do wrong,
and what a killed run leaves.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError
from dslaunch.kernels import ADAM
from dslaunch.runtime.errors import OffloadError
from tests.runtime.models import assert_same_bits, make_config
from tests.runtime.offload.residences import Where, make_engine
from tests.small_disk import small_disk_at

ON_DISK = Where("nvme", "nvme", is_apart=False)
TIMEOUT_S = 100
PAGE = 4096  # a file ends at the end of one
BLOCKS, WIDTH = 8, 128
UNIT = WIDTH * WIDTH + WIDTH  # elements of a block


class Deep(nn.Module):
    """Units of equal size, and a root of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _deep(folder: Path, *, bf16: bool) -> Any:
    torch.manual_seed(0)
    config = make_config(stage=3, reduce_bucket_size=1, bf16={"enabled": bf16})
    for key in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][key] = {"device": "nvme", "nvme_path": str(folder)}
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 1
    return dslaunch.initialize(model=Deep(), config=config)[0]


def _step(engine: Any, seed: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = x.bfloat16() if engine.bfloat16_enabled() else x
    engine.backward(engine(x).float().square().mean())
    engine.step()


def _live_bytes() -> int:
    gc.collect()
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (Tensor, nn.Parameter)
    }
    return sum(sizes.values())


@pytest.fixture
def alone() -> Iterator[None]:
    """Tensors of earlier tests do not count."""
    gc.collect()
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_has_three_units_in_memory_and_a_rest_has_none(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    before = _live_bytes()
    engine = _deep(tmp_path, bf16=bf16)
    param_bytes = 2 if bf16 else 4
    state_bytes = 3 * 4 if bf16 else 2 * 4  # the master is the parameter, or beside it
    seen: list[int] = []

    def step(*args: Any, **kwargs: Any) -> None:
        seen.append(_live_bytes() - before)
        real_step(*args, **kwargs)

    real_step = ADAM.step
    _step(engine, 0)
    monkeypatch.setattr(ADAM, "step", step)
    _step(engine, 1)
    assert len(seen) == BLOCKS
    # three units are in memory or kept for the next, and the gradients of two
    most = UNIT * (3 * (state_bytes + param_bytes) + 2 * param_bytes)
    assert 0.95 * most <= max(seen) <= 1.05 * most
    everything = BLOCKS * UNIT * (param_bytes + state_bytes)
    assert max(seen) < 0.55 * everything
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    padding = len(files) * PAGE
    on_disk = everything + BLOCKS * UNIT * param_bytes  # with gradients
    assert on_disk <= sum(path.stat().st_size for path in files) <= 1.02 * on_disk + padding
    engine.destroy()
    assert not list(tmp_path.iterdir())


def test_what_is_away_reads_as_nan(tmp_path: Path) -> None:
    engine = make_engine(3, "bf16", ON_DISK, str(tmp_path))
    for sub_buffer in engine.optimizer.sub_buffers:
        for state in (
            sub_buffer.optimizer_shard.master,
            *sub_buffer.optimizer_shard.states.values(),
            sub_buffer.param_shard.kept,
        ):
            assert torch.isnan(state).all()
    engine.destroy()


def test_a_folder_that_is_none_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^zero_optimization.offload_optimizer.nvme_path: .*no such folder"
    ) as caught:
        make_engine(2, "fp32", ON_DISK, str(tmp_path / "missing"))
    assert "\n" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a folder"):
        make_engine(2, "fp32", ON_DISK, str(tmp_path / "file"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk_at(tmp_path / "small", "size=256k") as folder:
        yield folder


@pytest.mark.filterwarnings("ignore:.*direct")
def test_a_full_disk_is_named_with_what_was_wanted(small_disk: Path) -> None:
    with pytest.raises(OffloadError, match=f"offloading to NVMe: .*{small_disk}") as caught:
        _deep(small_disk, bf16=False)
    assert "\n" not in str(caught.value)


RUN = """
import sys
from pathlib import Path
import torch
from tests.runtime.offload import test_disk as t

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
engine = t._deep(folder / "nvme", bf16=True)
if (folder / "checkpoint").exists():
    engine.load_checkpoint(str(folder / "checkpoint"))
while engine.global_steps < steps:
    t._step(engine, engine.global_steps)
    if engine.global_steps % 3 == 0:
        engine.save_checkpoint(str(folder / "checkpoint"))
    print("step", engine.global_steps, flush=True)
torch.save({name: value.clone() for name, value in engine.state_dict().items()}, folder / "end.pt")
engine.destroy()
"""


def _start(folder: Path, steps: int) -> subprocess.Popen[str]:
    (folder / "nvme").mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(steps)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_killed_in_a_step_loses_nothing_that_a_checkpoint_held(tmp_path: Path) -> None:
    steps = 8
    whole = _start(tmp_path / "whole", steps)
    killed = _start(tmp_path / "killed", 10**6)
    assert killed.stdout is not None
    for line in killed.stdout:
        if line == "step 5\n":
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT_S)
    assert killed.returncode == -signal.SIGKILL
    left = list((tmp_path / "killed" / "nvme").iterdir())
    assert left, "files of a killed run stay until a later run looks"
    second = _start(tmp_path / "killed", steps)
    assert second.communicate(timeout=TIMEOUT_S)[0].splitlines()[0] == "step 4", (
        "the checkpoint of step 3 was read"
    )
    assert whole.communicate(timeout=TIMEOUT_S)[0].splitlines()[0] == "step 1"
    assert_same_bits(torch.load(tmp_path / "killed" / "end.pt"), torch.load(tmp_path / "whole" / "end.pt"))
    assert not list((tmp_path / "killed" / "nvme").iterdir())


@pytest.mark.slow
def test_two_jobs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    first, second = (_deep(tmp_path, bf16=True) for _ in range(2))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
    for seed in range(2):
        _step(first, seed)
        _step(second, seed)
    first.destroy()
    _step(second, 2)
    fresh = _deep(tmp_path, bf16=True)
    for seed in range(3):
        _step(fresh, seed)
    assert_same_bits(dict(second.state_dict()), dict(fresh.state_dict()))
    for engine in (second, fresh):
        engine.destroy()
    deadline = time.monotonic() + TIMEOUT_S
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
