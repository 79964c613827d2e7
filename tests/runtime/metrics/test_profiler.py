"""Operations, parameters and latencies of modules, against formulas worked out by hand."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.metrics.amounts import (
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from dslaunch.runtime.metrics.model_profile import ModelProfile, ModuleRow, ProfiledRun
from dslaunch.runtime.metrics.profiler import FlopsProfiler, get_model_profile
from tests.runtime.models import Uneven, batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

B, T, D, H = 2, 5, 16, 24  # samples, tokens, width of the model, width inside the feed-forward part


class Attention(nn.Module):
    """One block of a transformer, on torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D, bias=False)
        self.mlp = nn.ModuleList([nn.Linear(D, H), nn.Linear(H, D)])

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(B, T, 4, D // 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(B, T, D)
        x = x + self.out(mixed)
        result: Tensor = self.mlp[1](torch.relu(self.mlp[0](x)))
        return result


PROJECTIONS = B * T * (D * 3 * D + D * D)  # MACs
SCORES_AND_MIX = 2 * B * T * T * D  # each token against each, once for the scores and once for the values
FEED_FORWARD = B * T * 2 * D * H

COUNTED = {
    "linear": (nn.Linear(7, 5), (3, 7), 3 * 7 * 5, 7 * 5 + 5),
    "linear without a bias, more dimensions": (nn.Linear(7, 5, bias=False), (2, 3, 7), 6 * 7 * 5, 35),
    # 2 samples, 9 x 8 places, 6 channels out of 4 in two groups, a kernel of 3 x 2
    "conv2d": (nn.Conv2d(4, 6, (3, 2), groups=2), (2, 4, 11, 9), 2 * 9 * 8 * 6 * 2 * 6, 6 * 2 * 6 + 6),
    "attention": (
        Attention(),
        (B, T, D),
        PROJECTIONS + SCORES_AND_MIX + FEED_FORWARD,
        D * 3 * D + 3 * D + D * D + 2 * D * H + H + D,
    ),
    # In evaluation torch's own layer is one operation, which has no formula: it is taken apart.
    "torch's layer": (
        nn.TransformerEncoderLayer(D, 4, H, batch_first=True),
        (B, T, D),
        PROJECTIONS + SCORES_AND_MIX + FEED_FORWARD,
        D * 3 * D + 3 * D + D * D + D + 2 * D * H + H + D + 4 * D,
    ),
    "nothing that counts": (nn.LayerNorm(6), (3, 6), 0, 12),
}


@pytest.mark.parametrize(("model", "shape", "macs", "params"), COUNTED.values(), ids=COUNTED.keys())
def test_the_counts_are_those_of_the_formulas(
    model: nn.Module, shape: tuple[int, ...], macs: int, params: int
) -> None:
    model.train()
    found = get_model_profile(model, input_shape=shape, print_profile=False, as_string=False)
    assert found == (2 * macs, macs, params)
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled()


def test_products_with_a_vector_are_counted_too() -> None:
    class Vectors(nn.Module):
        def forward(self, matrix: Tensor, vector: Tensor) -> Tensor:
            return torch.dot(matrix @ vector, torch.addmv(vector[:3], matrix, vector))

    found = get_model_profile(
        Vectors(), args=[torch.ones(3, 4), torch.ones(4)], print_profile=False, as_string=False
    )
    assert found == (2 * (12 + 12 + 3), 27, 0)


def profile_of(model: nn.Module, x: Tensor, **how: object) -> str:
    """What print_model_profile() says, with every time as T."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    profiler.stop_profile()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        profiler.print_model_profile(**how)  # type: ignore[arg-type]
    profiler.end_profile()
    return re.sub(r"[0-9.e+]+ [mu]?s\b", "T", re.sub(r"[0-9.e+]+ [KMGT]?FLOPS", "R FLOPS", said.getvalue()))


def test_the_speeds_of_a_step_count_each_of_its_parts() -> None:
    row = ModuleRow(name="", class_name="Model", params=10, flops=4000, duration_s=1.0, extra="", children=())
    run = ProfiledRun(
        world_size=2,
        model_parallel_size=1,
        micro_batch_size=3,
        train_batch_size=12,
        times_s={"forward": 2.0, "backward": 8.0, "step": 6.0},
        recompute_fwd_factor=1.0,
        is_compiled=False,
    )
    profile = ModelProfile(root=row, run=run, step=4, uncounted={}, num_calls=2)
    said = dict(
        re.split(r":\s+", line, maxsplit=1)
        for line in profile.lines(module_depth=-1, top_modules=1, detailed=False)
        if ": " in line
    )
    assert {
        "forward latency": "1 s",
        "forward FLOPS": "2 KFLOPS",
        "backward latency": "4 s",
        "backward FLOPS, 3 times the forward's FLOPs": "1.5 KFLOPS",
        "forward and backward FLOPS": "1.6 KFLOPS",
        "step latency": "6 s",
        "forwards, backwards and step": "16 s",
        "FLOPS of these": "1 KFLOPS",
        "samples/s of these": "0.75",
    }.items() <= said.items()


PROFILE = """\
-- profile of Sequential after step 4, on this rank --
forwards:                 1
parameters of the model:  124
MACs of a forward:        330 MACs
FLOPs of a forward:       660
forward latency:          T
forward FLOPS:            R FLOPS
FLOPs: matrix products, convolutions and attention. Latencies: with the count running, a device waited for at modules.

the first 1 classes of modules at each depth
depth 0:
    params      - Sequential: 124
    MACs        - Sequential: 330 MACs
    fwd latency - Sequential: T
depth 1:
    params      - Linear: 124
    MACs        - Linear: 330 MACs
    fwd latency - Linear: T

each module: parameters, MACs, latency of the forward, FLOPS
Sequential(124 = 100% Params, 330 MACs = 100% MACs, T = P latency, R FLOPS)
  (0): Linear(80 = 64.52% Params, 210 MACs = 63.64% MACs, T = P latency, R FLOPS, in_features=7, out_features=10, bias=True)
  (1): Tanh(0 = 0% Params, 0 MACs = 0% MACs, T = P latency, R FLOPS)
  (2): Linear(44 = 35.48% Params, 120 MACs = 36.36% MACs, T = P latency, R FLOPS, in_features=10, out_features=4, bias=True)
-- end of the profile --
"""  # noqa: E501 - as it is printed


def test_a_profile_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # A second for each module, so that two Linears take longer than one Tanh.
    ticks = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("dslaunch.runtime.metrics.profiler.time", ticks)
    model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 4))
    said = profile_of(model, torch.ones(3, 7), profile_step=4)
    said = re.sub(r"T = [0-9.e-]+% latency", "T = P latency", said)
    assert said == PROFILE


def test_depth_and_details_can_be_cut() -> None:
    said = profile_of(Uneven(), batch(0), module_depth=1, top_modules=2)
    assert "(blocks): ModuleList(" in said
    assert "Tanh" not in said
    assert "depth 2" not in said
    assert re.search(r"params      - ModuleList: [0-9.]+ K, Linear: 136\n", said)
    assert "each module" not in profile_of(Uneven(), batch(0), detailed=False)


def test_a_shared_module_a_nested_call_and_an_ignored_type() -> None:
    """A module that is called twice counts both; one inside itself counts once;
    an ignored one belongs to who calls it.
    """

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = self.inner(x)
            result: Tensor = self(x, again=False) if again else x
            return result

    model = Twice()
    profiler = FlopsProfiler(model)
    for ignored in ((), (nn.Linear,)):
        profiler.start_profile(ignore_list=ignored)
        model(torch.ones(2, 4))
        profiler.stop_profile()
        assert profiler.get_total_macs() == 2 * (2 * 16)
        assert profiler.get_total_params() == 16
        with contextlib.redirect_stdout(io.StringIO()) as said:
            profiler.print_model_profile()
        assert ("(inner): Linear" in said.getvalue()) is (not ignored)
    profiler.end_profile()
    assert (profiler.flops, profiler.macs, profiler.params) == (128, 64, 16)  # what was printed
    assert not model._forward_hooks
    assert not model.inner._forward_pre_hooks


def test_the_time_of_a_module_holds_those_of_its_children_and_no_forward_adds_to_what_was_stopped() -> None:
    model = Uneven()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(batch(0))
    profiler.stop_profile()
    first = profiler.get_total_duration()
    model(batch(0))
    assert isinstance(first, float)
    assert profiler.get_total_duration() == first > 0.0
    inner = sum(profiler._duration_s(child) for child in (model.first, model.blocks, model.norm, model.last))
    assert 0.0 < inner < first


def test_what_has_no_formula_is_named() -> None:
    with torch.no_grad():
        said = profile_of(nn.LSTM(4, 4), torch.ones(3, 2, 4), detailed=False)
    if "aten.mkldnn_rnn_layer" not in said:
        pytest.skip("this build of torch takes an LSTM apart")
    assert "not counted, no formula is known: aten.mkldnn_rnn_layer, 1 times" in said


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))
    profiler.start_profile()
    model[0](torch.ones(2, 4))
    profiler.stop_profile()
    assert profiler.get_total_macs() == 32
    profiler.end_profile()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"mode": "train"}, 'get_model_profile(mode=\'train\'): must be "forward" or "generate"'),
        (
            {"input_shape": [1, 2]},
            "get_model_profile(input_shape=[1, 2]): must be a tuple with a size in it, as (8, 128)",
        ),
        ({}, "get_model_profile(): give input_shape=, args= or kwargs="),
    ],
)
def test_what_cannot_be_profiled_is_refused(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_model_profile(nn.Linear(2, 2), **given)  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_a_profile_goes_to_a_file_and_its_numbers_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.txt"
    found = get_model_profile(
        nn.Linear(700, 500), kwargs={"input": torch.ones(8, 700)}, output_file=str(path)
    )
    assert found == ("5.6 M", "2.8 MMACs", "350.5 K")
    assert path.read_text(encoding="utf-8").startswith("-- profile of Linear after step 1")
    with pytest.raises(ConfigError, match="cannot be written to"):
        get_model_profile(nn.Linear(2, 2), input_shape=(2,), output_file=str(tmp_path))


def test_numbers_are_read_with_units() -> None:
    assert [number_to_string(n) for n in (0, 1, 999, 1500, 2.5e9, 3e12, 0.02, 3e-6)] == [
        "0 ",
        "1 ",
        "999 ",
        "1.5 K",
        "2.5 G",
        "3 T",
        "20 m",
        "3 u",
    ]
    assert params_to_string(7e9) == "7 B"
    assert params_to_string(7e9, units="M") == "7000 M"
    assert (macs_to_string(1.23456e6), duration_to_string(0.5, precision=1)) == ("1.23 MMACs", "500 ms")


# ---- inside the engine

UNEVEN_MACS = 7 * 15 + 3 * (15 * 17 + 17 * 15) + 15  # for a sample


def _profiled(rank: int, stage: int, folder: str) -> tuple[str, int]:
    engine, *_ = dslaunch.initialize(
        model=make_model(),
        config=make_config(
            stage=stage,
            gradient_accumulation_steps=2,
            flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{folder}/profile.txt"},
        ),
    )
    written = []
    for step in range(3):
        for micro in batch(step).chunk(2):
            own = micro.chunk(engine.world_size)[rank]
            with torch.no_grad():
                engine(own)  # is no part of a step
            engine.backward(loss_of(engine, own))
            engine.step()
        written.append(Path(folder, "profile.txt").exists())
    assert written[0] is False
    profiler = engine.flops_profiler
    assert profiler is not None
    assert not profiler.started
    return Path(folder, "profile.txt").read_text(encoding="utf-8"), engine.flops_profiler_profile_step()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_engine_writes_the_profile_of_one_step(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    said, step = ranks(_profiled, stage, str(tmp_path), world_size=2)[0]
    assert step == 1
    lines = dict(re.findall(r"^(.+?): +(\S.*)$", said, flags=re.MULTILINE))
    samples = 3  # 12 on two ranks, in two micro batches
    assert lines["parameters of the model"] == params_to_string(
        sum(param.numel() for param in Uneven().parameters())
    )
    assert lines["ranks"] == "2"
    assert lines["forwards"] == "2"
    assert lines["samples in a micro batch on one rank"] == "3"
    assert lines["MACs of a forward"] == macs_to_string(samples * UNEVEN_MACS)
    seconds = {
        name: float(number) * {"m": 1e-3, "u": 1e-6, "": 1.0}[unit]
        for name in ("forward latency", "backward latency", "step latency", "forwards, backwards and step")
        for number, unit in re.findall(r"([0-9.]+) ([mu]?)s", lines[name])
    }
    whole = 2 * (seconds["forward latency"] + seconds["backward latency"]) + seconds["step latency"]
    assert seconds["forwards, backwards and step"] == pytest.approx(whole, rel=0.01)  # printed with 2 digits
    assert float(lines["samples/s of these"]) == pytest.approx(12 / whole, rel=0.01)
    # The percentages of the tree are of true sizes, not of shards.
    assert f"(first): Linear(120 = {100 * 120 / 1792:.4g}% Params" in said
