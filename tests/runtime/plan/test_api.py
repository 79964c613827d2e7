"""`dslaunch.plan()` says what the tensors of a model need, by hand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.errors import ConfigError

WIDTH, SAMPLES = 512, 64
NUM_BYTES = WIDTH * WIDTH * 4  # of one layer in float32
PLAIN = {"train_micro_batch_size_per_gpu": SAMPLES, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def batch() -> Tensor:
    return torch.ones(SAMPLES, WIDTH)


def test_the_kinds_of_a_plain_model_are_those_of_its_tensors() -> None:
    planned = dslaunch.plan(Stack, batch, PLAIN, hosts=2)
    assert planned.kinds["parameters"] == planned.kinds["gradients"] == 4 * NUM_BYTES
    assert "masters and optimizer states" not in planned.kinds
    # what the layers keep of their inputs, and one gradient that is still autograd's
    assert NUM_BYTES < planned.kinds["activations"] <= NUM_BYTES + 6 * SAMPLES * WIDTH * 4
    assert sum(planned.kinds.values()) == planned.peak_bytes


def test_adam_in_16_bits_at_stage_1_has_a_part_of_its_states() -> None:
    config = PLAIN | {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    planned = dslaunch.plan(Stack, lambda: batch().bfloat16(), config, hosts="2x4")
    (kinds,) = (
        one["peaks"]["device"]["kinds"]
        for one in planned.answer["phases"]
        if one["name"] == "step 2: backward"
    )
    assert kinds["parameters"] == 4 * NUM_BYTES / 2
    assert kinds["masters and optimizer states"] == 3 * 4 * NUM_BYTES / 8
    assert planned.peak_phase == "building the model"  # whose values are in float32 then


def test_a_model_that_fits_no_memory_here_is_planned() -> None:
    """Its parameters alone are 40 GB; nothing of them is allocated."""

    def large() -> nn.Module:
        with dslaunch.zero.Init(config_dict_or_path=config):
            return nn.Sequential(*(nn.Linear(50_000, 50_000, bias=False) for _ in range(4)))

    def mean() -> nn.Module:
        return Mean(large())

    config = PLAIN | {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    planned = dslaunch.plan(mean, lambda: torch.ones(1, 50_000), config, hosts="64x8")
    assert planned.kinds["parameters"] == pytest.approx(4 * 50_000**2 * 4 / 512, rel=0.01)
    assert planned.kinds["gathered parameters"] >= 50_000**2 * 4


class Mean(nn.Module):
    """The mean of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.module(x).mean()
        return mean


def test_states_on_the_host_are_host_memory() -> None:
    config = PLAIN | {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    planned = dslaunch.plan(Stack, batch, config, hosts=2)
    assert "masters and optimizer states" not in planned.kinds
    assert planned.host_bytes >= 3 * 4 * NUM_BYTES / 2


class Checkpointed(Stack):
    """Of each layer torch's checkpoint() keeps the input alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.mean()


def test_inputs_of_checkpoints_in_host_memory_are_activations_there() -> None:
    depth, large = 8, 16 * SAMPLES
    one = large * WIDTH * 4
    peaks = {}
    for on_host in (False, True):
        config = PLAIN | {"activation_checkpointing": {"cpu_checkpointing": on_host}}
        planned = dslaunch.plan(lambda: Checkpointed(depth), lambda: torch.ones(large, WIDTH), config)
        (phase,) = (each for each in planned.answer["phases"] if each["name"] == "step 2: forward")
        pinned = phase["peaks"].get("pinned", {}).get("kinds", {})
        peaks[on_host] = phase["peaks"]["device"]["kinds"]["activations"], pinned.get("activations", 0)
    assert peaks[False][1] == 0
    # all but the newest input; on the device are that one, two that leave, and what the next layer makes
    assert peaks[True][1] == (depth - 1) * one
    assert peaks[False][0] - peaks[True][0] >= (depth - 4) * one


def test_amounts_of_the_optimizer_step_are_told_apart() -> None:
    config = PLAIN | {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    step = dslaunch.plan(Stack, batch, config, hosts=2).answer["steps"][-1]
    (sent,) = step["sent"]
    assert sent["update_bytes"]["all_gather"] == sent["bytes"]["all_gather"] == 4 * NUM_BYTES / 2
    assert "reduce_scatter" not in sent["update_bytes"]
    assert sent["number"]["reduce_scatter"] == sent["number"]["all_gather"] >= 1
    assert {one["is_update"] for one in step["on_device"] if one["flops"]} == {False}
    assert any(one["is_update"] for one in step["on_device"])


class Packed(nn.Module):
    """A frozen layer whose weights are packed two to a byte, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(WIDTH * WIDTH // 2, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scale", torch.ones(WIDTH * WIDTH // 64))
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.stack((self.packed & 15, self.packed >> 4), 1).float() - 8
        weight = (numbers.view(-1, 64) * self.get_buffer("scale")[:, None]).view(WIDTH, WIDTH)
        mean: Tensor = (x @ weight.to(x.dtype) + self.up(self.down(x))).mean()
        return mean


@pytest.mark.parametrize(("bf16", "number_bytes"), [({}, 4), ({"bf16": {"enabled": True}}, 2)])
def test_packed_weights_count_as_they_are(bf16: dict[str, object], number_bytes: int) -> None:
    planned = dslaunch.plan(
        Packed, lambda: batch().to(torch.bfloat16 if bf16 else torch.float32), PLAIN | bf16
    )
    (kinds,) = (
        one["peaks"]["device"]["kinds"]
        for one in planned.answer["phases"]
        if one["name"] == "step 2: backward"
    )
    scales, adapter = WIDTH * WIDTH // 64, 2 * 8 * WIDTH
    held = WIDTH * WIDTH // 2 + 4 * scales + adapter * number_bytes  # a buffer keeps its float32
    assert kinds["parameters"] == pytest.approx(held, rel=0.02)


class Choosing(Stack):
    """A model with an operation of another library, whose values decide how many columns it gives."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        torch.library.define("standin::chosen", "(Tensor x) -> Tensor")

        @torch.library.register_fake("standin::chosen")
        def _(x: Tensor) -> Tensor:
            return x.new_empty((x.shape[0], torch.library.get_ctx().new_dynamic_size(max=most)))

    def forward(self, x: Tensor) -> Tensor:
        self.chosen = torch.ops.standin.chosen(x)
        return super().forward(x)


@pytest.mark.parametrize(
    ("most", "said", "num_columns"), [(None, "the smallest, 0", 0), (WIDTH, "the largest", WIDTH)]
)
def test_operations_of_other_libraries_are_planned_by_their_shapes(
    most: int | None, said: str, num_columns: int
) -> None:
    planned = dslaunch.plan(lambda: Choosing(most), batch, PLAIN)
    kinds = [one["peaks"]["device"]["kinds"] for one in planned.answer["phases"] if "backward" in one["name"]]
    plain = dslaunch.plan(Stack, batch, PLAIN)
    assert kinds[0]["activations"] - plain.kinds["activations"] == num_columns * SAMPLES * 4
    line, what = planned.answer["guesses"]
    assert line["line"].startswith(__file__ + ":")
    assert said in line["what"]
    assert what["line"] == "the operations of standin"


class Deciding(Stack):
    """A program whose steps depend on values."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if loss.item() < 0:
            raise RuntimeError("not here")
        return loss


def test_a_guess_is_told_with_the_line_that_asks() -> None:
    planned = dslaunch.plan(Deciding, batch, PLAIN)
    (guess,) = planned.answer["guesses"]
    assert guess["line"].startswith(__file__ + ":")
    assert "decides" in guess["what"]


class Stubborn(Stack):
    """A model that is only trained: no forward for an evaluation, and a state that no file can hold."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise TypeError("no labels")
        return super().forward(x)

    def get_extra_state(self) -> object:
        return self

    def set_extra_state(self, state: object) -> None: ...


def test_what_a_program_cannot_do_after_its_steps_is_left_out_and_said() -> None:
    planned = dslaunch.plan(Stubborn, batch, PLAIN, hosts=2)
    assert planned.kinds["parameters"] == 4 * NUM_BYTES
    evaluation, load = planned.answer["guesses"]
    assert evaluation == {
        "line": "the evaluation after the steps",
        "what": "it is left out, because of TypeError: no labels",
    }
    assert load["line"] == "the load after the steps"
    assert "the module's extra state" in load["what"]


class Broken(Stack):
    """A model with a mistake in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(SAMPLES, WIDTH + 1))


def test_a_mistake_of_the_program_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"test_api\.py:\d+: RuntimeError: shape"):
        dslaunch.plan(Broken, batch, PLAIN)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hosts": "4y8"}, "'4x8'"),
        ({"device_memory": "much"}, "'24GB'"),
        ({"device": "tpu"}, r"^plan\(device='tpu'\): give 'cuda' or 'cpu'"),
        ({"config": "gone.json"}, "^gone.json: no such file; give the path of a ds_config"),
    ],
)
def test_arguments_that_cannot_be_read_are_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dslaunch.plan(Stack, batch, **{"config": PLAIN, **given})  # type: ignore[arg-type]


class Named(Stack):
    """A model that returns its loss in a dict."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"scores": x, "loss": super().forward(x)}


def test_the_loss_of_a_dict_is_found_by_its_name() -> None:
    assert dslaunch.plan(Named, batch, PLAIN).peak_bytes


def test_a_number_is_a_gpu_and_the_accelerator_too() -> None:
    def model() -> nn.Module:
        device = torch.device(0)
        assert isinstance(device, torch.device)
        assert pickle.loads(pickle.dumps([device])) == [torch.device("cuda", 0)]
        assert torch.ones(2, device=0).new_zeros(2, device=0).is_cuda
        assert torch.empty_like(torch.ones(2), device=0).is_cuda
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        with torch.device(0):
            assert torch.ones(2).is_cuda
            return Stack()

    assert dslaunch.plan(model, batch, PLAIN, hosts=2).kinds["parameters"] == 4 * NUM_BYTES


def test_random_states_of_other_ranks_and_names_of_types_are_no_obstacle() -> None:
    def model() -> nn.Module:
        dslaunch.init_distributed()
        generator = torch.Generator()
        assert isinstance(generator, torch.Generator)
        state = generator.get_state().cuda()
        torch.distributed.broadcast(state, 0)
        generator.set_state(state.cpu())
        torch.set_rng_state(state.cpu())
        on_gpu = torch.ones(2).cuda()
        assert (torch.ones(2).type(), on_gpu.type()) == ("torch.FloatTensor", "torch.cuda.FloatTensor")
        assert str(on_gpu.type("torch.HalfTensor").device) == "cpu"
        assert on_gpu.type(torch.int64).dtype == torch.int64
        return Stack()

    assert dslaunch.plan(model, batch, PLAIN, hosts=2).kinds["parameters"] == 4 * NUM_BYTES


def test_a_block_that_generates_is_a_phase_in_which_parameters_are_whole() -> None:
    def generating() -> Stack:
        plain = dslaunch.Engine.forward

        def forward(engine: Any, *args: Any) -> Any:
            with engine.generating(weights="whole"):
                engine.module(*args)
            return plain(engine, *args)

        dslaunch.Engine.forward = forward  # type: ignore[method-assign]
        return Stack()

    config = PLAIN | {"zero_optimization": {"stage": 3, "reduce_bucket_size": WIDTH * WIDTH}}
    phases = dslaunch.plan(generating, batch, config, hosts=4).answer["phases"]
    gathered = {
        name: [one["peaks"]["device"]["kinds"] for one in phases if one["name"] == name][-1]
        for name in ("generation", "step 2: forward")
    }
    assert gathered["generation"]["gathered parameters"] >= 4 * NUM_BYTES
    assert gathered["step 2: forward"]["gathered parameters"] < 4 * NUM_BYTES
