"""The accelerator that programs ask: the CPU here, GPUs where there are some."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import psutil
import pytest
import torch

from dslaunch.runtime.compat.accelerator.accelerator import Accelerator
from dslaunch.runtime.compat.accelerator.cpu import CpuAccelerator
from dslaunch.runtime.compat.accelerator.cuda import CudaAccelerator
from dslaunch.runtime.compat.accelerator.current import (
    get_accelerator,
    is_current_accelerator_supported,
    set_accelerator,
)
from dslaunch.runtime.errors import ConfigError

DEEPSPEED = Path(sys.prefix) / "deepspeed" / "deepspeed" / "accelerator" / "abstract_accelerator.py"
MIB = 2**20
ABSENT = {
    *("op_builder_dir", "create_op_builder", "get_op_builder", "build_extension"),
    *("register_host_memory", "unregister_host_memory", "pin_memory_alignment", "prefer_triton_grouped_mm"),
}


@pytest.fixture
def cpu() -> Accelerator:
    return CpuAccelerator()


@pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="without DeepSpeed in .venv/deepspeed; `make setup` puts it there"
)
def test_both_have_every_name_of_deepspeeds_or_say_why_not() -> None:
    classes = [node for node in ast.parse(DEEPSPEED.read_text()).body if isinstance(node, ast.ClassDef)]
    functions = [node for node in classes[0].body if isinstance(node, ast.FunctionDef)]
    names = {node.name for node in functions if not node.name.startswith("_")}
    for kind in (CpuAccelerator, CudaAccelerator):
        assert {name for name in names if not hasattr(kind, name)} == ABSENT
        for name in ABSENT:
            with pytest.raises(
                AttributeError, match=f"get_accelerator\\(\\).{name} is not available in dslaunch: "
            ):
                getattr(kind(), name)
        for node in functions:
            if node.name in names - ABSENT:
                ours = getattr(kind, node.name)
                if not isinstance(ours, property):
                    theirs = [arg.arg for arg in node.args.args]
                    assert list(ours.__code__.co_varnames[: ours.__code__.co_argcount]) == theirs, node.name
    with pytest.raises(AttributeError, match=r"^'CpuAccelerator' object has no attribute 'other'$"):
        _ = CpuAccelerator().other


def test_the_one_of_this_process_is_what_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    other = "cpu" if found == "cuda" else "cuda"
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    get_accelerator.cache_clear()
    assert get_accelerator().device_name() == found
    assert get_accelerator() is get_accelerator()
    assert is_current_accelerator_supported()
    get_accelerator.cache_clear()
    monkeypatch.setenv("DS_ACCELERATOR", found)
    assert get_accelerator().device_name() == found
    for asked in (other, "xpu"):
        get_accelerator.cache_clear()
        monkeypatch.setenv("DS_ACCELERATOR", asked)
        with pytest.raises(
            ConfigError, match=f"^DS_ACCELERATOR='{asked}' in the environment: this process trains on {found}"
        ):
            get_accelerator()
    with pytest.raises(ConfigError, match=r"^set_accelerator\(CpuAccelerator\)"):
        set_accelerator(CpuAccelerator())


def test_the_memory_that_torch_keeps_of_a_gpu_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    CudaAccelerator().empty_cache()
    assert called == ["empty_cache"]


def test_devices_are_counted_as_the_launcher_counts_workers(
    cpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (cpu.device_count(), cpu.current_device()) == (1, 0)
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert cpu.device_count() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert (cpu.device_count(), cpu.current_device()) == (4, 2)


def test_names_and_devices_of_the_cpu(cpu: Accelerator) -> None:
    cpu.set_device(1)
    cpu.synchronize()
    assert (cpu.device_name(), cpu.device_name(1), cpu.current_device_name()) == ("cpu", "cpu", "cpu")
    assert cpu.device(1) == torch.device("cpu")
    assert cpu.is_available()
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.on_accelerator(torch.ones(1))
    assert not cpu.on_accelerator(torch.ones(1, device="meta"))
    assert cpu.is_synchronized_device()
    assert cpu.use_host_timers()
    assert cpu.resolves_data_dependency()
    assert cpu.handles_memory_backpressure()
    assert not cpu.is_triton_supported()
    assert cpu.export_envs() == []
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    cpu.set_visible_devices_envs(environment, [2, 3])
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_seeds_and_states_are_those_of_torchs_generator(cpu: Accelerator) -> None:
    before = torch.get_rng_state()
    try:
        for seed in (cpu.manual_seed, cpu.manual_seed_all):
            seed(7)
            assert cpu.initial_seed() == cpu.default_generator(0).initial_seed() == 7
            state = cpu.get_rng_state()
            drawn = torch.rand(3)
            cpu.set_rng_state(state, 0)
            assert torch.equal(torch.rand(3), drawn)
        assert cpu.random() is torch.random
    finally:
        torch.set_rng_state(before)


def test_tensors_of_each_dtype_are_made_from_values(cpu: Accelerator) -> None:
    kinds = {
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }
    for name, dtype in kinds.items():
        made = getattr(cpu, name)([1, 2])
        assert (made.tolist(), made.dtype, made.device.type) == ([1, 2], dtype, "cpu")
    assert cpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    assert all((cpu.is_bf16_supported(), cpu.is_fp16_supported(), cpu.is_fp64_supported()))


def test_streams_are_contexts_and_events_measure_the_hosts_time(cpu: Accelerator) -> None:
    stream = cpu.Stream()
    with cpu.stream(stream):
        stream.wait_stream(cpu.current_stream())
    assert cpu.default_stream() is not None
    begun, ended = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="not recorded"):
        begun.elapsed_time(ended)
    begun.record(stream)
    ended.record()
    ended.record()
    ended.wait(stream)
    ended.synchronize()
    assert ended.query()
    ended._recorded_at = begun._recorded_at + 0.25
    assert begun.elapsed_time(ended) == pytest.approx(250.0)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        cpu.Event().elapsed_time(ended)
    with pytest.raises(ConfigError, match="interprocess"):
        cpu.Event(interprocess=True)
    cpu.range_push("step")
    cpu.range_pop()
    with pytest.raises(ConfigError, match="domain='mine'"):
        cpu.range_push("step", domain="mine")
    assert cpu.lazy_call(lambda: 3) == 3
    assert not cpu.is_current_stream_capturing()
    for call in (cpu.create_graph, lambda: cpu.capture_to_graph(None), lambda: cpu.replay_graph(None)):
        with pytest.raises(ConfigError, match="the CPU has no graphs"):
            call()


def test_memory_of_the_cpu_is_what_the_process_has_in_physical_memory(cpu: Accelerator) -> None:
    cpu.empty_cache()
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    assert before == pytest.approx(psutil.Process().memory_info().rss, abs=4 * MIB)
    held = torch.ones(64 * MIB // 4)
    grown = cpu.memory_allocated()
    assert 60 * MIB < grown - before < 80 * MIB
    del held
    cpu.empty_cache()
    assert cpu.memory_allocated() - before < 16 * MIB
    # Its peak, which only the kernel saw: no call asked while the second one was there.
    held = torch.ones(128 * MIB // 4)
    del held
    cpu.empty_cache()
    peak = cpu.max_memory_allocated()
    assert 120 * MIB < peak - before < 150 * MIB
    assert cpu.max_memory_reserved() == cpu.max_memory_cached() == peak
    assert cpu.memory_stats()["allocated_bytes.all.peak"] == peak
    for reset in (cpu.reset_max_memory_allocated, cpu.reset_max_memory_cached, cpu.reset_peak_memory_stats):
        reset()
        assert cpu.max_memory_allocated() - before < 32 * MIB
    assert cpu.memory_reserved() == pytest.approx(cpu.memory_cached(), abs=4 * MIB)
    assert cpu.total_memory() == psutil.virtual_memory().total
    assert 0 < cpu.available_memory() < cpu.total_memory()


def test_pinned_memory_is_plain_where_there_is_nothing_to_copy_to(cpu: Accelerator) -> None:
    given = torch.ones(2, 3)
    assert cpu.pin_memory(given) is given
    assert not cpu.is_pinned(given)
    cpu.unpin_memory(given)
    assert (
        cpu.pin_empty(2, 3, dtype=torch.float16).shape
        == cpu.pin_empty((2, 3), dtype=torch.float16).shape
        == (2, 3)
    )
    like = cpu.pin_empty_like(given, dtype=torch.int32)
    assert (like.shape, like.dtype) == (given.shape, torch.int32)
    with pytest.raises(ConfigError, match="device='meta'"):
        cpu.pin_empty(1, dtype=torch.float32, device="meta")


@pytest.mark.slow  # the first to ask imports torch's compiler
def test_a_compile_backend_is_one_that_torch_knows(cpu: Accelerator) -> None:
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ConfigError, match=r"set_compile_backend\('none'\): must be one of .*inductor"):
        cpu.set_compile_backend("none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_asked_by_the_same_names() -> None:  # noqa: PLR0915  (a list of calls)
    gpu = CudaAccelerator()
    gpu.set_device(0)
    assert (gpu.device_name(), gpu.device_name(0), gpu.current_device_name()) == ("cuda", "cuda:0", "cuda:0")
    assert gpu.device(0) == torch.device("cuda", 0)
    assert (gpu.current_device(), gpu.is_available(), gpu.export_envs()) == (0, True, ["NCCL"])
    assert gpu.device_count() >= 1
    assert len(gpu.communication_backend_version()) >= 2
    gpu.manual_seed(7)
    gpu.manual_seed_all(7)
    assert gpu.initial_seed() == gpu.default_generator(0).initial_seed() == 7
    state = gpu.get_rng_state()
    drawn = torch.rand(3, device="cuda")
    gpu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    stream = gpu.Stream()
    begun, ended = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
    with gpu.stream(stream):
        begun.record()
        made = gpu.FloatTensor([1.0, 2.0])
        ended.record()
    gpu.current_stream().wait_stream(stream)
    gpu.synchronize()
    assert begun.elapsed_time(ended) >= 0.0
    assert gpu.default_stream() == torch.cuda.default_stream()
    assert gpu.on_accelerator(made)
    assert not gpu.on_accelerator(torch.ones(1))
    gpu.reset_peak_memory_stats()
    before = gpu.memory_allocated()
    held = torch.ones(4 * MIB, device="cuda")
    assert gpu.memory_allocated() - before == held.nbytes
    del held
    assert gpu.max_memory_allocated() - before == 16 * MIB
    assert gpu.max_memory_reserved() >= gpu.memory_reserved() >= gpu.memory_allocated()
    assert gpu.memory_stats()["allocated_bytes.all.current"] == gpu.memory_allocated()
    gpu.reset_max_memory_allocated()
    gpu.empty_cache()
    assert 0 < gpu.available_memory() < gpu.total_memory()
    pinned = gpu.pin_memory(torch.ones(3))
    assert pinned.tolist() == [1.0] * 3
    fresh = gpu.pin_memory(torch.ones(2, 3), make_copy=False, match_shape=False)
    assert fresh.shape == (6,)
    assert all(
        map(gpu.is_pinned, (pinned, fresh, gpu.pin_empty(2, dtype=torch.int8), gpu.pin_empty_like(pinned)))
    )
    graph, counted = gpu.create_graph(), torch.zeros(1, device="cuda")
    with gpu.capture_to_graph(graph):
        assert gpu.is_current_stream_capturing()
        counted += 1
    counted.zero_()
    gpu.replay_graph(graph)
    gpu.replay_graph(graph)
    assert counted.item() == 2.0
    gpu.range_push("step")
    gpu.range_pop()
    called: list[int] = []
    gpu.lazy_call(lambda: called.append(1))
    assert called == [1]
    assert torch.float32 in gpu.supported_dtypes()
    assert gpu.is_triton_supported() is (torch.cuda.get_device_capability()[0] >= 8)
