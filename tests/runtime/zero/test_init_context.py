"""zero.Init: a model is sharded while it is made, and comes out as if it had been made plainly on rank 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import skip_init
from torch.nn.utils.parametrizations import weight_norm

import dslaunch
from dslaunch import ConfigError, zero
from dslaunch.runtime.zero.parameters.early_parameter import early_of
from dslaunch.runtime.zero.parameters.freed_parameter import FreedParameter
from tests.runtime.models import (
    assert_same_bits,
    batch,
    make_config,
    make_model,
    snapshot,
    train_engine,
)
from tests.runtime.ranks import Ranks


class Applied(nn.Module):
    """A parent that initializes its children, in the three usual ways, and reads what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(15))
        self.first = nn.Linear(7, 15)
        self.blocks = nn.ModuleList([nn.Linear(15, 15) for _ in range(3)])
        self.register_buffer("seen", torch.rand(15))
        self.last = nn.Linear(15, 1)
        self.apply(self._init)
        nn.init.normal_(self.scale)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                param.data.uniform_(-1, 1)
        self.sum = float(self.blocks[0].weight.detach().sum())
        self.width = self.first(torch.zeros(2, 7)).shape[1]

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            module.weight.data[0] *= 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        result: Tensor = self.last(x + self.seen.to(x.dtype))
        return result


class Copied(Applied):
    """Weights that are taken from others: in place, by three at once, as copies of modules,
    and by replacing data.
    """

    def __init__(self) -> None:
        super().__init__()
        one, two, three = self.blocks
        one.weight.data.copy_(two.weight.data)
        self.packed = nn.Linear(15, 45)
        self.packed.weight.data.copy_(torch.cat([one.weight, two.weight, three.weight]))
        self.packed.bias.data = torch.full((45,), 0.5)
        self.clones = nn.ModuleList([copy.deepcopy(self.blocks) for _ in range(2)])
        with torch.no_grad():
            three.bias += two.bias

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        hidden = self.packed(self.first(x)).view(-1, 3, 15).sum(1)
        for one in self.clones[0]:
            hidden = hidden + one(hidden)
        return result + self.last(hidden)


class Tied(nn.Module):
    """One parameter in two modules, one of another module, and one under a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 15, bias=False)
        self.normed = weight_norm(nn.Linear(15, 15))
        self.down = nn.Linear(7, 15, bias=False)
        self.down.weight = self.up.weight
        self.last = nn.Linear(15, 1)
        self.last.extra = self.normed.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.normed(self.up(x)) + self.last.extra
        result: Tensor = self.last(torch.tanh(hidden + self.down(x)))
        return result


class Library(nn.Module):
    """Modules of torch that write to themselves late, or are made by copying."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(15, 3, 17, dropout=0.0, batch_first=True)
        self.first = nn.Linear(7, 15)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.memory = nn.GRU(15, 17, batch_first=True)
        self.table = nn.ParameterDict({"a": torch.rand(17), "b": torch.rand(17)})
        self.rows = nn.ParameterList(torch.rand(1, 17) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.memory(self.encoder(self.first(x)[None]))
        return (hidden[0] * self.table["a"] + self.table["b"] * self.rows[0] + self.rows[1]).mean(-1)


MODELS = (Applied, Copied, Tied, Library)


def _made(kind: type[nn.Module], *, seed: int, **arguments: Any) -> nn.Module:
    torch.manual_seed(seed)
    with zero.Init(**arguments):
        return kind()


def _build(rank: int, kind: type[nn.Module]) -> tuple[list[str], dict[str, Tensor], dict[str, Any]]:
    """Made with a seed of its own on each rank; returns what is not sharded, all values,
    and plain attributes.
    """
    model = _made(kind, seed=rank)
    whole = [name for name, param in model.named_parameters() if type(param) is not FreedParameter]
    names = {name: value for name, value in vars(model).items() if isinstance(value, (int, float))}
    return whole, snapshot(model.named_parameters()), names


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_every_rank_has_what_rank_0_alone_would_have_made(
    ranks: Ranks, kind: type[nn.Module], world_size: int
) -> None:
    plain = make_model(kind, seed=0)
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    results = ranks(_build, kind, world_size=world_size)
    for whole, values, _ in results:
        assert whole == []
        assert_same_bits(values, expected)
    _, _, names = results[0]  # of the others, what was drawn and read while a module was whole is their own
    assert names == {name: value for name, value in vars(plain).items() if name in names}


def _train(rank: int, kind: type[nn.Module], stage: int, bf16: bool, is_early: bool) -> Any:
    config = make_config(stage=stage, bf16={"enabled": bf16})
    model = _made(kind, seed=0, enabled=is_early)
    engine = dslaunch.initialize(model=model, config=config)[0]
    losses = train_engine(engine, steps=3, dtype=torch.bfloat16 if bf16 else torch.float32)
    return losses, snapshot(model.named_parameters()), any(early_of(one) for one in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage", "bf16"),
    [*((kind, 3, False) for kind in MODELS), (Applied, 3, True), (Copied, 0, True), (Tied, 1, False),
     (Applied, 2, True)],
)  # fmt: skip
def test_training_gives_the_same_bits_as_from_a_plain_model(
    ranks: Ranks, kind: type[nn.Module], stage: int, bf16: bool
) -> None:
    early = ranks(_train, kind, stage, bf16, True, world_size=2)
    plain = ranks(_train, kind, stage, bf16, False, world_size=2)
    for (losses, params, is_kept), (plain_losses, plain_params, _) in zip(early, plain, strict=True):
        assert losses == plain_losses
        assert_same_bits(params, plain_params)
        assert not is_kept


def _client_optimizer(rank: int, is_early: bool) -> dict[str, Tensor]:
    """The optimizer is made of parameters that are not here."""
    model = _made(Applied, seed=0, enabled=is_early)
    weights = [param for name, param in model.named_parameters() if "weight" in name]
    others = [param for name, param in model.named_parameters() if "weight" not in name]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": others, "weight_decay": 0.0}])
    config = {key: value for key, value in make_config(stage=3).items() if key != "optimizer"}
    engine = dslaunch.initialize(model=model, optimizer=optimizer, config=config)[0]
    train_engine(engine, steps=2)
    return snapshot(model.named_parameters())


def test_an_optimizer_may_be_made_of_sharded_parameters(ranks: Ranks) -> None:
    early = ranks(_client_optimizer, True, world_size=2)
    for params, plain in zip(early, ranks(_client_optimizer, False, world_size=2), strict=True):
        assert_same_bits(params, plain)


def _load_pretrained(rank: int) -> dict[str, Tensor]:
    """As Hugging Face's from_pretrained does: the state_dict is rank 0's alone,
    and goes in module by module.
    """
    model = _made(Applied, seed=1)
    state = make_model(Applied, seed=2).state_dict() if rank == 0 else {}

    def load(module: nn.Module, prefix: str = "") -> None:
        with zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if rank == 0:
                module._load_from_state_dict(state, prefix, {}, True, [], [], [])  # type: ignore[no-untyped-call]
        for name, child in module.named_children():
            load(child, f"{prefix}{name}.")

    load(model)
    assert all(type(param) is FreedParameter for param in model.parameters())
    engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    return engine.state_dict()


def test_weights_are_loaded_as_from_pretrained_does(ranks: Ranks) -> None:
    for state in ranks(_load_pretrained, world_size=2):
        assert_same_bits(state, make_model(Applied, seed=2).state_dict())  # buffers too


def _fill_and_fail(param: nn.Parameter) -> None:
    param.data.fill_(4.0)
    raise ZeroDivisionError


def _edit(rank: int) -> tuple[str, dict[str, Tensor]]:
    model = _made(Applied, seed=0)
    before = snapshot(model.named_parameters())
    with pytest.raises(ConfigError) as edited, zero.GatheredParameters(model.parameters()), torch.no_grad():
        model.get_parameter("scale").fill_(3.0)
    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(model.parameters(), modifier_rank=0):
        _fill_and_fail(model.get_parameter("scale"))
    assert_same_bits(snapshot(model.named_parameters()), before)  # neither counts
    with zero.GatheredParameters(model.parameters()):
        with (
            zero.GatheredParameters([model.get_parameter("scale")] * 2, modifier_rank=1),
            torch.no_grad(),
        ):
            model.get_parameter("scale").fill_(rank + 5.0)
        assert_same_bits({"scale": model.get_parameter("scale").data}, {"scale": torch.full((15,), 6.0)})
    return str(edited.value), snapshot(model.named_parameters())


def test_before_initialize_parameters_are_read_and_written_in_gathered_parameters(ranks: Ranks) -> None:
    expected = {name: param.detach() for name, param in make_model(Applied).named_parameters()}
    expected["scale"] = torch.full((15,), 6.0)
    for edited, values in ranks(_edit, world_size=2):
        assert edited.startswith("parameter 'Applied.scale' was written inside GatheredParameters")
        assert_same_bits(values, expected)


def _several(rank: int) -> bool:
    """Contexts after and inside each other, models that are none of theirs, and one that was made before."""
    torch.manual_seed(0)
    before = make_model(Applied)
    with zero.Init():
        first = Applied()
        with zero.Init(), zero.Init(enabled=False):
            second = Tied()
        with zero.Init():
            alone = nn.Linear(3, 3)
        made_inside = [*first.parameters(), *second.parameters(), *alone.parameters()]
        assert all(type(param) is FreedParameter for param in made_inside)  # and the outer one goes on
        second.up.weight.data.fill_(1.0)
        engine = dslaunch.initialize(model=first, config=make_config(stage=3))[0]
    between = make_model(Applied)
    with zero.Init():
        third = Tied()
    for model in (before, between):
        assert not any(type(param) is FreedParameter or early_of(param) for param in model.parameters())
    made = make_model(Tied)
    assert_same_bits({"up": snapshot(second.named_parameters())["up.weight"]}, {"up": torch.ones(15, 7)})
    assert all(early_of(param) is not None for param in third.parameters())
    train_engine(engine, steps=1)
    return type(made.get_parameter("up.weight")) is nn.Parameter and not _hooks()


def _hooks() -> list[Any]:
    """What the context has hung into torch."""
    return [
        *torch_module._global_parameter_registration_hooks.values(),
        *torch_module._global_module_registration_hooks.values(),
    ]


def test_contexts_inside_and_after_each_other_and_models_beside_them(ranks: Ranks) -> None:
    assert ranks(_several, world_size=2) == [True, True]


class Failing(nn.Module):
    """It cannot be made; `made` keeps what there is of it."""

    def __init__(self, made: list[nn.Module]) -> None:
        super().__init__()
        made.append(self)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.late = nn.Parameter(torch.zeros(3))
        self.one.weight.data.fill_(2.0)
        raise ZeroDivisionError


def _fail(rank: int) -> dict[str, Tensor]:
    made: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), zero.Init():
        Failing(made)
    assert not _hooks()
    whole = [name for name, param in made[0].named_parameters() if type(param) is nn.Parameter]
    assert whole == ["one.weight"]
    assert not any(hasattr(made[0].get_parameter(name), "ds_id") for name in whole)
    assert_same_bits(
        {"one": snapshot(made[0].named_parameters())["one.weight"]}, {"one": torch.full((3, 3), 2.0)}
    )
    return snapshot(_made(Tied, seed=0).named_parameters())


def test_an_exception_inside_leaves_nothing_behind(ranks: Ranks) -> None:
    expected = {name: param.detach() for name, param in make_model(Tied).named_parameters()}
    for params in ranks(_fail, world_size=2):
        assert_same_bits(params, expected)


def _of_existing(rank: int, dtype: torch.dtype | None) -> tuple[bool, dict[str, Tensor]]:
    model = make_model(Applied, seed=rank)
    zero.Init(module=model, dtype=dtype)
    return (
        all(type(param) is FreedParameter for param in model.parameters()),
        snapshot(model.named_parameters()),
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_module_that_exists_is_sharded_and_converted_at_once(
    ranks: Ranks, dtype: torch.dtype | None
) -> None:
    expected = {name: param.detach().to(dtype) for name, param in make_model(Applied).named_parameters()}
    for is_sharded, params in ranks(_of_existing, dtype, world_size=2):
        assert is_sharded
        assert {param.dtype for param in params.values()} == {dtype or torch.float32}
        assert_same_bits(params, expected)


def _sent(rank: int) -> dict[str, Tensor]:
    model = _made(Applied, seed=0)
    before = {name: param.ds_id for name, param in model.named_parameters()}
    assert model.to("cpu", torch.bfloat16) is model
    assert {name: param.ds_id for name, param in model.named_parameters()} == before
    assert {type(param) for param in model.parameters()} == {FreedParameter}
    return snapshot(model.named_parameters())


def test_a_sharded_module_is_sent_to_a_device_and_another_dtype(ranks: Ranks) -> None:
    expected = {name: param.detach() for name, param in make_model(Applied).bfloat16().named_parameters()}
    for values in ranks(_sent, world_size=2):
        assert_same_bits(values, expected)


def _beside(rank: int, arguments: dict[str, Any]) -> bool:
    """Whether anything is sharded."""
    model = _made(Applied, seed=0, dtype=torch.bfloat16, **arguments)
    return any(type(param) is FreedParameter or param.dtype == torch.bfloat16 for param in model.parameters())


def test_nothing_happens_when_disabled_or_for_another_stage(ranks: Ranks) -> None:
    assert ranks(_beside, {"enabled": False}, world_size=2) == [False, False]
    assert ranks(_beside, {"config_dict_or_path": make_config(stage=2)}, world_size=2) == [False, False]
    assert ranks(_beside, {"config": {**make_config(stage=3), "x": "auto"}}, world_size=2) == [True, True]


def _alone(rank: int, is_early: bool) -> dict[str, Tensor]:
    """It can be used before initialize(), and afterwards as ever."""
    model = _made(Applied, seed=0, dtype=torch.float32, enabled=is_early)
    out = model(batch(0))
    engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    assert torch.equal(engine(batch(0)), out)
    train_engine(engine, steps=1)
    return snapshot(model.named_parameters())


def test_a_rank_that_is_alone_keeps_its_model_whole(ranks: Ranks) -> None:
    (params,) = ranks(_alone, True, world_size=1)
    assert_same_bits(params, ranks(_alone, False, world_size=1)[0])


def _refused(rank: int, arguments: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        zero.Init(**arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"remote_device": "nvme"}, "zero.Init(remote_device='nvme') is not available"),
        ({"pin_memory": True}, "zero.Init(pin_memory=True) is not available"),
        ({"mpu": 1}, "zero.Init(mpu=1): has none of the methods of an mpu"),
        ({"zero_quantized_weights": True}, "zero.Init(zero_quantized_weights=True) is not available"),
        ({"data_parallel_group": 7}, "zero.Init(data_parallel_group=7) is not available"),
        ({"dtype": torch.int8}, "zero.Init(dtype=torch.int8): must be a floating-point dtype"),
        ({"config": {}, "config_dict_or_path": {}}, "are both given"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(
    ranks: Ranks, arguments: dict[str, Any], message: str
) -> None:
    config = (
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        if "config" not in arguments
        else {}
    )
    given = {"config": config, **arguments} if config else arguments
    assert message in ranks(_refused, given, world_size=1)[0]


class Shared(nn.Module):
    """Two parameters that share their memory by their data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight.data = self.one.weight.data


class Overlapping(nn.Module):
    """Two parameters of which each has elements of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(9)
        self.one, self.two = nn.Parameter(whole[:6]), nn.Parameter(whole[3:])


def _share(rank: int, kind: type[nn.Module]) -> str:
    with pytest.raises(ConfigError) as caught:
        _made(kind, seed=0)
    assert not _hooks()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Shared, "'Linear.weight' and 'Linear.weight'"),
        (Overlapping, "'Overlapping.one' and 'Overlapping.two'"),
    ],
)
def test_parameters_that_share_memory_without_being_the_same_are_refused(
    ranks: Ranks, kind: type[nn.Module], names: str
) -> None:
    for message in ranks(_share, kind, world_size=2):
        assert message.startswith(f"parameters {names} share their storage")


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1).expand(3))


def _expand(rank: int) -> str:
    model = _made(Expanded, seed=0)
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=make_config(stage=3))
    return str(caught.value)


def test_an_expanded_parameter_stays_one_and_is_refused_by_initialize(ranks: Ranks) -> None:
    for message in ranks(_expand, world_size=2):
        assert message.startswith("parameter 'scale' is expanded")


def _with_an_alias(rank: int, holder: int) -> int:
    """Rank `holder` has an alias that the other has not; returns how much of the parameter stays with it."""
    with zero.Init():
        model = Tied()
        param = model.get_parameter("up.weight")
        aliases = [param.data][: rank == holder]
        nn.init.ones_(model.get_parameter("last.weight"))
        stays = type(param) is nn.Parameter
        del aliases
    assert all(type(param) is FreedParameter for param in model.parameters())
    return stays


def test_rank_0_decides_for_all_what_stays_because_it_has_an_alias(ranks: Ranks) -> None:
    assert ranks(_with_an_alias, 0, world_size=2) == [True, True]
    assert ranks(_with_an_alias, 1, world_size=2) == [False, False]


def _sparse(rank: int) -> str:
    with dslaunch.zero.Init():
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model.graph = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=make_config(stage=3))
    return str(caught.value)


def test_a_sparse_parameter_stays_as_it_is_and_is_refused_by_initialize(ranks: Ranks) -> None:
    for message in ranks(_sparse, world_size=2):
        assert message.startswith("parameter 'graph' is a sparse tensor (torch.sparse_coo)")


class Pair(nn.Module):
    def __init__(self, size: int, device: str | None = None) -> None:
        super().__init__()
        self.one = nn.Linear(size, size, device=device)
        self.more = nn.ModuleList([nn.Linear(size, size, device=device)])


class Unfilled(nn.Module):
    """Layers whose own initialization is left out, and one that is used as it is."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.one = skip_init(nn.Linear, 5, 3)
        self.pair = skip_init(Pair, 3)
        self.beside = beside
        for param in (*self.one.parameters(), *self.pair.parameters()):
            nn.init.uniform_(param)


def _unfilled(rank: int) -> tuple[list[str], dict[str, Tensor]]:
    beside = nn.Linear(2, 2)
    torch.manual_seed(rank)
    with zero.Init():
        model = Unfilled(beside)
    params = dict(model.named_parameters())
    whole = [name for name, param in params.items() if type(param) is nn.Parameter]
    del params["beside.weight"], params["beside.bias"]
    return whole, snapshot(params.items())


def test_layers_of_skip_init_are_sharded_once_they_are_part_of_a_module(ranks: Ranks) -> None:
    """What was made before the context stays as it is."""
    torch.manual_seed(0)
    expected = dict(Unfilled(nn.ParameterList()).named_parameters())
    for whole, params in ranks(_unfilled, world_size=2):
        assert whole == ["beside.weight", "beside.bias"]
        assert_same_bits(params, {name: param.detach() for name, param in expected.items()})
