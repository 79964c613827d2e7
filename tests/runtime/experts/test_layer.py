"""Layers of experts over ranks are trained as one process trains them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.experts.api import (
    MoE,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)
from dslaunch.runtime.experts.placed import expert_lines
from dslaunch.shared.axes import Axes
from dslaunch.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.exhaustive import few
from tests.runtime.experts.models import (
    EXPERTS,
    WIDTH,
    Layered,
    Numbers,
    loss_of,
    make_layered,
    start,
    train,
    train_plain,
)
from tests.runtime.models import assert_same_bits
from tests.runtime.ranks import Ranks
from tests.runtime.step.test_torch_optimizer_rule import MUON_DRIFT, STEEP_DRIFT

NEAR = 1e-6  # relative: sums of float32 in another order
Size = int | tuple[int, int]


def _near(got: Numbers, expected: Numbers, *, limit: float) -> None:
    for (loss, norm), (other_loss, other_norm) in zip(got, expected, strict=True):
        assert loss == pytest.approx(other_loss, rel=2 * limit)
        assert norm == pytest.approx(other_norm, rel=2 * limit)


def _true_names(engine: Any) -> dict[str, str]:
    """By the name here, the name in the whole model."""
    units = engine._model.units
    found = {}
    for sub_buffer in (one for unit in units for one in unit.sub_buffers):
        for index, member in enumerate(sub_buffer.members):
            found[member.name] = sub_buffer.true_name(index)
    return found


def _trained(
    rank: int, ep_size: Size, stage: int, options: dict[str, Any]
) -> tuple[Numbers, dict[str, Tensor]]:
    model = make_layered(rank, ep_size, **options)
    engine = start(model, stage)
    numbers = train(engine)
    names = _true_names(engine)
    values = {names[name]: safe_get_full_fp32_param(param).cpu() for name, param in model.named_parameters()}
    engine.destroy()
    return numbers, values


# Other gates than the table of ways to train (training/test_parity.py) has, and residuals.
DRAWS = {"capacity_factor": 0.7, "use_residual": True}  # RTS draws which tokens it drops
KEEPS_ALL: dict[str, Any] = {"k": 3, "drop_tokens": False, "use_residual": True}
CASES: list[tuple[Size, int, dict[str, Any]]] = [
    ((2, 4), 3, DRAWS),
    (2, 0, {"k": 2}),  # samples the second expert
    (4, 2, KEEPS_ALL),
]


def _trained_cases(rank: int) -> list[tuple[Numbers, dict[str, Tensor]]]:
    return [_trained(rank, *case) for case in CASES]


def _are_near(
    results: list[tuple[Numbers, dict[str, Tensor]]],
    options: dict[str, Any],
    *,
    world_size: int,
    limit: float,
) -> None:
    """What ranks have trained is what one process trains, and together they have all of it."""
    plain = make_layered(0, 1, **options)
    expected = train_plain(plain, world_size=world_size)
    seen = set()
    for numbers, values in results:
        _near(numbers, expected, limit=limit)
        for name, value in values.items():
            torch.testing.assert_close(
                value, plain.get_parameter(name).detach(), rtol=2 * limit, atol=2 * limit, msg=name
            )
            seen.add(name)
    assert seen == {name for name, _ in plain.named_parameters()}


def test_experts_over_ranks_are_trained_as_in_one_process(ranks: Ranks) -> None:
    found = zip(*ranks(_trained_cases, world_size=4), strict=True)
    for (_, _, options), results in zip(CASES, found, strict=True):
        _are_near(list(results), options, world_size=4, limit=NEAR)


def test_experts_that_take_as_many_tokens_as_come_are_trained_on_gpus(cuda_ranks: Ranks) -> None:
    """Without what is drawn: a device draws other numbers than the processor."""
    results = cuda_ranks(_trained, 2, 3, KEEPS_ALL, world_size=2)
    _are_near(results, KEEPS_ALL, world_size=2, limit=2 * NEAR)


# ---- checkpoints and weights


def test_before_initialize_a_state_dict_has_the_experts_of_one_rank_by_deepspeed_s_numbers() -> None:
    model, other = make_layered(0, 2), make_layered(1, 2)
    state = model.state_dict()
    other.load_state_dict(state)
    params = dict(other.named_parameters())
    assert params.keys() == state.keys()
    assert all(torch.equal(params[name], value) for name, value in state.items())
    whole = make_layered(0, 1).state_dict()
    with pytest.raises(ConfigError, match=r"deepspeed_experts\.2', and this rank holds 2 of the model's"):
        other.load_state_dict(whole)


def _start_adam(rank: int, ep_size: int, stage: int) -> Any:
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    return start(make_layered(rank, ep_size), stage, optimizer=adam, bf16={"enabled": True})


def _all_of(engine: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole weights, and this rank's masters and states by their names in the whole model."""
    whole = {name: value.clone() for name, value in engine.state_dict().items()}
    names, own = _true_names(engine), {}
    for name, param in engine.module.named_parameters():
        own[names[name]] = safe_get_full_fp32_param(param)
        own[names[name] + ".exp_avg"] = safe_get_full_optimizer_state(param, "exp_avg")
    return whole, own


def _saved(rank: int, ep_size: int, stage: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = _start_adam(rank, ep_size, stage)
    train(engine)
    engine.save_checkpoint(folder, tag="here")
    engine.save_16bit_model(folder, "weights.bin")
    engine.save_16bit_model(folder, "weights.safetensors")
    found = _all_of(engine)
    assert_same_bits({name: value.clone() for name, value in engine.weights()}, found[0])
    engine.destroy()
    return found


def _loaded(rank: int, ep_size: int, stage: int, folder: str) -> tuple[dict[str, Tensor], ...]:
    engine = _start_adam(rank + 7 * ep_size, ep_size, stage)
    engine.load_checkpoint(folder, tag="here")
    whole, own = _all_of(engine)
    local = {name: value.clone() for name, value in engine.module.state_dict().items()}
    train(engine)
    engine.load_state_dict(whole)
    again = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return whole, own, local, again


def test_a_checkpoint_is_loaded_over_other_numbers_of_ranks_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    """From 2 ranks at stage 3 to 4 at stage 1, and to one process: weights, masters and states. The module's
    own state_dict has this rank's experts by their numbers.
    """
    from safetensors.torch import load_file

    saved = ranks(_saved, 2, 3, str(tmp_path), world_size=4)
    whole = saved[0][0]
    own = {name: value for _, values in saved for name, value in values.items()}
    assert whole.keys() == make_layered(0, 1).state_dict().keys()
    for other, _ in saved:
        assert_same_bits(other, whole)
    for weights in (torch.load(tmp_path / "weights.bin"), load_file(tmp_path / "weights.safetensors")):
        assert_same_bits(weights, whole)
    for ep_size, stage in ((4, 1), (1, 0)):
        seen: set[str] = set()
        loaded = ranks(_loaded, ep_size, stage, str(tmp_path), world_size=ep_size)
        for rank, (values, states, local, again) in enumerate(loaded):
            assert_same_bits(values, whole)
            assert_same_bits(again, whole)
            assert_same_bits(states, {name: own[name] for name in states})
            assert_same_bits(local, {name: whole[name] for name in local})
            experts = {
                name.split("deepspeed_experts.")[1][0] for name in local if "deepspeed_experts" in name
            }
            assert experts == {
                str(number) for number in range(EXPERTS) if number * ep_size // EXPERTS == rank
            }
            seen |= states.keys()
        assert seen == own.keys()


# ---- what is sent, and what is refused


def _sent(rank: int, ep_size: int) -> int:
    """Return the bytes of all-to-alls of one forward and backward."""
    model = make_layered(rank, ep_size, use_rts=False)
    engine = start(model, 1)
    loss = loss_of(engine, torch.randn(16, 7))
    engine.backward(loss)
    sent: int = engine._wire.meter.bytes_by_kind()["all_to_all"]
    engine.destroy()
    return sent


def test_slots_travel_there_and_back_in_forward_and_backward(ranks: Ranks) -> None:
    """4 (e-1)/e of tokens * width * 4 bytes, for each of two layers, at a capacity factor of 1."""
    for ep_size in (2, 4):
        expected = 2 * 4 * (ep_size - 1) * 16 * WIDTH * 4 // ep_size
        assert ranks(_sent, ep_size, world_size=4) == [expected] * 4


def _refused(rank: int, ep_size: int, changes: dict[str, Any]) -> str:
    model = make_layered(rank, ep_size)
    with pytest.raises(ConfigError) as caught:
        start(model, 3, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ep_size", "changes", "said"),
    [
        (
            4,
            {},
            "experts over 4 ranks (ep_size 4): the ranks that train the same layers are 2 (dp x sp), "
            "which 4 does not",
        ),
        (2, {"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size 2 and experts over 2 ranks"),
        (2, {"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size 2 and experts"),
    ],
)
def test_what_does_not_go_with_experts_is_refused(
    ranks: Ranks, ep_size: int, changes: dict[str, Any], said: str
) -> None:
    assert all(said in one for one in ranks(_refused, ep_size, changes, world_size=2))


def test_layers_that_cannot_be_are_refused() -> None:
    expert = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"num_experts=3, ep_size=2\): every rank holds as many"):
        MoE(4, expert, num_experts=3, ep_size=2)
    with pytest.raises(ConfigError, match=r"MoE\(ep_size='2'\): must be a whole number above 0"):
        MoE(4, expert, num_experts=4, ep_size="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="noisy_gate_policy='Noise'"):
        MoE(4, expert, noisy_gate_policy="Noise")
    with pytest.raises(ConfigError, match="enable_expert_tensor_parallelism=True"):
        MoE(4, expert, enable_expert_tensor_parallelism=True)


def _with_buffers(rank: int) -> str:
    expert = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    with pytest.raises(ConfigError) as caught:
        start(nn.Sequential(MoE(7, expert, num_experts=2, ep_size=2)), 0)
    return str(caught.value)


def _with_marks(rank: int) -> str:
    model = nn.Linear(7, 7)
    model.weight.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        start(model, 0)
    return str(caught.value)


def test_experts_that_would_be_mixed_up_are_refused(ranks: Ranks) -> None:
    assert all("have a buffer, '0.1.running_mean'" in one for one in ranks(_with_buffers, world_size=2))
    assert all("'weight' has allreduce=False" in one for one in ranks(_with_marks, world_size=2))


def test_groups_of_experts_are_deepspeeds() -> None:
    axes = Axes(dp=4)
    assert [list(map(tuple, lines)) for lines in expert_lines(axes, 2)] == [
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    ]
    strided = expert_lines(axes, 2, is_strided=True)
    assert [list(map(tuple, lines)) for lines in strided] == [[(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    staged, _ = expert_lines(Axes(pp=2, dp=2), 2)
    assert list(map(tuple, staged)) == [(0, 1), (2, 3)]


def test_parameters_of_experts_go_into_groups_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2))
    params = list(model.parameters())
    first, *of_experts = split_params_into_different_moe_groups_for_optimizer(
        {"params": params, "name": "parameters", "lr": 0.1}, max_group_size=24
    )
    assert not any(is_moe_param(one) for one in first["params"])
    assert [len(group["params"]) for group in of_experts] == [2, 2]
    assert all((group["moe"], group["name"], group["lr"]) == (True, "ep_size_2", 0.1) for group in of_experts)
    assert has_moe_layers(model) == (True, 4)
    with pytest.raises(ValueError, match="has parameters of experts and no name"):
        split_params_into_different_moe_groups_for_optimizer({"params": params})


def _unequal(rank: int) -> list[bool]:
    """Ranks have other numbers of tokens, and in the last step none has any."""
    finite = []
    for k in (1, 2):
        model = make_layered(rank, 2, k=k)
        engine = start(model, 3, gradient_accumulation_steps=1)
        for numbers in ([0, 3, 9, 1], [5, 0, 0, 2], [0, 0, 0, 0]):
            output, l_aux = engine(torch.randn(numbers[rank], 7))
            engine.backward(output.float().sum() + l_aux)
            engine.step()
            finite.append(bool(torch.isfinite(torch.tensor(engine.get_global_grad_norm()))))
        engine.destroy()
    return finite


def test_ranks_may_have_other_numbers_of_tokens_or_none(ranks: Ranks) -> None:
    assert ranks(_unequal, world_size=4, deadline_s=60.0) == [[True] * 6] * 4


def _routers(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    found = []
    for stage in (0, 3):
        torch.manual_seed(rank)
        model = Layered((2, 2))
        router = model.blocks[0]["moe"].deepspeed_moe.gate.wg.weight  # type: ignore[index]
        before = router.detach().clone()
        engine = start(model, stage)
        at_start = safe_get_full_fp32_param(router)
        train(engine)
        after = safe_get_full_fp32_param(router)
        assert at_start is not None
        assert after is not None
        found.append((before, at_start, after))
        engine.destroy()
    return found


def test_routers_that_ranks_made_with_other_values_have_those_of_the_first_and_stay_one(ranks: Ranks) -> None:
    for of_stage in zip(*ranks(_routers, world_size=4), strict=True):
        first, first_at_start, first_after = of_stage[0]
        assert not torch.equal(first, of_stage[1][0])
        assert not torch.equal(first_at_start, first_after)
        for _, at_start, after in of_stage:
            assert torch.equal(at_start, first)
            assert torch.equal(after, first_after)


class _Apart(nn.Module):
    """Dense layers behind and before a layer of experts; a rank may leave the last of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, min_capacity=0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, *, leaves_out: bool) -> Tensor:
        x = self.first(x)
        x = x + self.moe(x)[0]
        for block in self.blocks[:-1] if leaves_out else self.blocks:
            x = x + torch.tanh(block(x))
        return x.pow(2).mean()


def _leave_out_later(rank: int, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = _Apart()
    engine = start(model, stage, gradient_accumulation_steps=1)
    for step in range(3):
        samples = torch.ones(8, 7) + step
        engine.backward(engine(samples, leaves_out=rank == 0 and step > 0))
        engine.step()
    values = {name: one.detach().clone() for name, one in model.named_parameters() if "experts" not in name}
    engine.destroy()
    return values


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_exchange_tokens_do_not_wait_for_a_layer_that_one_leaves_out(
    ranks: Ranks, stage: int
) -> None:
    """The order of averages is learnt in the first step; in the second a rank has nothing for its first."""
    first, second = ranks(_leave_out_later, stage, world_size=2, deadline_s=60.0)
    assert_same_bits(first, second)


# ---- optimizers that see whole parameters


def _of_whole_parameters(rank: int, name: str, stage: int, folder: str) -> None:
    """The owner of an expert's matrix is one of the ranks that share it."""
    limit = {"Muon": MUON_DRIFT, "Lamb": STEEP_DRIFT}[name]
    found = []
    for ep_size in (1, 2):
        engine = start(make_layered(rank, ep_size), stage, optimizer={"type": name, "params": {"lr": 0.02}})
        train(engine)
        names = _true_names(engine)
        key = "momentum_buffer" if name == "Muon" else "exp_avg"
        found.append({})
        for one, param in engine.module.named_parameters():
            found[-1][names[one]] = safe_get_full_fp32_param(param)
            state = key if param.ndim > 1 else "exp_avg"
            found[-1][names[one] + " state"] = safe_get_full_optimizer_state(param, state)
        engine.save_checkpoint(folder, tag=f"ep{ep_size}")
        engine.load_checkpoint(folder, tag="ep1")
        for one, param in engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(param), found[0][names[one]]), one
            state = safe_get_full_optimizer_state(param, key if param.ndim > 1 else "exp_avg")
            assert torch.equal(state, found[0][names[one] + " state"]), one
        engine.destroy()
    whole, parts = found
    for one, value in parts.items():
        torch.testing.assert_close(value, whole[one], rtol=0, atol=limit, msg=one)


@pytest.mark.parametrize(
    ("name", "stage"),
    few(
        [(name, stage) for name in ("Muon", "Lamb") for stage in (1, 2, 3)],
        lambda name, stage: (name, stage) == ("Lamb", 3),
    ),
)
def test_optimizers_that_see_whole_parameters_train_experts(
    ranks: Ranks, tmp_path: Path, name: str, stage: int
) -> None:
    ranks(_of_whole_parameters, name, stage, str(tmp_path), world_size=4)
