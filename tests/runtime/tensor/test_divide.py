"""Models whose layers are divided over ranks train as one process trains the whole."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.checkpoint.opened import open_checkpoint
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from dslaunch.runtime.compat import groups as process_groups
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.log import logger
from dslaunch.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import (
    CLIP,
    LENGTH,
    SIZES,
    Numbers,
    check,
    cut_sequence,
    loss_of_numbers,
    loss_of_tokens,
    make_config,
    make_hugging_face,
    make_net,
    number_batches,
    numbers,
    token_batches,
    tokens,
    torch_plan,
    train,
    train_plain,
)

pytest.importorskip("transformers")


def _whole(model: nn.Module) -> dict[str, Tensor]:
    values = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    return {name: value for name, value in values.items() if value is not None}


def _is_near(got: dict[str, Tensor], expected: nn.Module, *, limit: float = 2e-6) -> None:
    for name, param in expected.named_parameters():
        assert got[name].shape == param.shape, name
        assert torch.allclose(got[name].float(), param.detach().float(), rtol=0, atol=limit), name


# ---- Hugging Face's own plans


def _hugging_face(
    rank: int, kind: str, stage: int, tp: int, is_tied: bool, changes: dict[str, Any]
) -> tuple[Numbers, Numbers]:
    """Ranks begin with other values and other random numbers, and get rank 0's."""
    plain = make_hugging_face(kind, is_tied=is_tied, num_key_value_heads=max(2, tp))
    model = make_hugging_face(kind, seed=rank, is_tied=is_tied, num_key_value_heads=max(2, tp))
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage, tp=tp, **changes))
    assert (engine.dp_world_size, engine.mp_world_size) == (engine.world_size // tp, tp)
    expected = train_plain(plain, loss_of_tokens, token_batches())
    got = train(engine, loss_of_tokens, token_batches(), tp=tp)
    _is_near(_whole(model), plain, limit=5e-6)
    engine.eval()
    with torch.no_grad():
        given = {"input_ids": tokens()[:1], "labels": tokens()[:1], "num_items_in_batch": torch.tensor(7)}
        output, there = engine(**given), plain(**given)
    assert torch.allclose(output.loss, there.loss, atol=1e-5)
    if not changes:  # else each rank has the logits of a part of the vocabulary
        assert torch.allclose(output.logits, there.logits, atol=1e-4)
    engine.destroy()
    return got, expected


VOCABULARY = {"tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}}


@pytest.mark.parametrize(
    ("kind", "stage", "tp", "is_tied", "changes"),
    [
        ("Llama", 0, 2, True, {}),
        ("Llama", 1, 2, False, VOCABULARY),
        ("Qwen3", 3, 4, False, {}),
        ("Mixtral", 3, 2, False, {}),
        ("Gemma", 1, 2, True, {}),  # its embedding scales what it finds
        ("DeepseekV2", 2, 4, False, {}),  # all heads have one rotated key
        ("Apertus", 3, 2, False, {}),  # its plan leaves out parameters of the activations
    ],
)
def test_a_model_of_hugging_face_trains_by_its_own_plan(
    ranks: Ranks, kind: str, stage: int, tp: int, is_tied: bool, changes: dict[str, Any]
) -> None:
    for got, expected in ranks(_hugging_face, kind, stage, tp, is_tied, changes, world_size=4):
        check(got, expected)


def _loaded_in_parts(rank: int, kind: str, stage: int, folder: str) -> tuple[Numbers, Numbers]:
    """As from_pretrained() divides it while loading: DTensors, and forwards of transformers."""
    import transformers
    from transformers.distributed import DistributedConfig

    plain = make_hugging_face(kind)
    if rank == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2)
    )
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage))
    expected = train_plain(plain, loss_of_tokens, token_batches())
    got = train(engine, loss_of_tokens, token_batches(), tp=2)
    _is_near(_whole(model), plain, limit=5e-6)
    engine.eval()
    with torch.no_grad():
        assert torch.allclose(
            engine(input_ids=tokens()[:1]).logits, plain(input_ids=tokens()[:1]).logits, atol=1e-4
        )
    engine.destroy()
    return got, expected


def test_a_model_that_was_divided_while_it_was_loaded_trains(ranks: Ranks, tmp_path: Path) -> None:
    for got, expected in ranks(_loaded_in_parts, "Mixtral", 3, str(tmp_path), world_size=2):
        check(got, expected)


# ---- rules of the ds_config, and torch's plans


RULES = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r"blocks\.\d+\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
                {"patterns": [r"first\.weight$"], "gather_output": True},
            ]
        },
    }
}


def _by_rules(rank: int) -> tuple[Numbers, Numbers, list[list[int]]]:
    """An optimizer that was made before has the parts."""
    plain, model = make_net(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    config = make_config(1, **RULES)
    del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=model, optimizer=optimizer, config=config)
    shapes = [list(one.shape) for one in model.blocks[0].parameters()]
    expected = train_plain(plain, loss_of_numbers, number_batches())
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    _is_near(_whole(model), plain)
    engine.destroy()
    return got, expected, shapes


def test_rules_divide_columns_and_rows_of_any_model(ranks: Ranks) -> None:
    """At other stages: training/test_parity.py."""
    for got, expected, shapes in ranks(_by_rules, world_size=4):
        check(got, expected)
        assert shapes == [[12], [12], [24, 12], [24], [12, 24], [12]]


class Scale(nn.Module):
    """Four numbers, for the elements of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, 4)) * self.weight).flatten(-2)


def _shared_by_heads(rank: int, stage: int) -> tuple[Numbers, Numbers]:
    """A whole weight that each rank uses for its own heads, which a later rule would divide."""
    models = [make_net(), make_net()]
    for model in models:
        for block in model.blocks:
            block.up = nn.Sequential(block.up, Scale())
    rules = [
        {"patterns": [r".*\.up\.1\.weight$"], "partition_type": "skip", "grad_allreduce": True},
        {"patterns": [r".*\.up\."], "partition_type": "column"},
        {"patterns": [r".*\.down\."], "partition_type": "row"},
    ]
    divided = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    engine, *_ = dslaunch.initialize(
        model=models[1],
        model_parameters=[{"params": list(models[1].parameters())}],  # of before
        config=make_config(stage, tensor_parallel=divided),
    )
    expected = train_plain(models[0], loss_of_numbers, number_batches())
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    _is_near(_whole(models[1]), models[0])
    engine.destroy()
    return got, expected


def test_a_rule_that_skips_a_weight_may_have_its_gradients_added(ranks: Ranks) -> None:
    for got, expected in ranks(_shared_by_heads, 2, world_size=2):
        check(got, expected)


def _with_gradients_of_its_own(rank: int) -> str:
    model = make_net()
    model.blocks[1].norm.weight.register_hook(lambda grad: grad * (1 + rank))
    rules = [
        {"patterns": [r".*\.up\."], "partition_type": "column"},
        {"patterns": [r".*\.down\."], "partition_type": "row"},
    ]
    divided = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, tensor_parallel=divided))
    with pytest.raises(ConfigError) as caught:
        train(engine, loss_of_numbers, number_batches(), tp=2)
    engine.destroy()
    return str(caught.value)


def test_whole_parameters_whose_gradients_differ_are_named(ranks: Ranks) -> None:
    for said in ranks(_with_gradients_of_its_own, world_size=2):
        assert said.startswith(
            "ranks 0 and 1 compute the same layers together, and have made different gradients of parameter "
            "'blocks.1.norm.weight', which each of them has whole: they differ by 50% of the larger one."
        )


class Tied(nn.Module):
    """The head is tied to the embedding, and rules may divide the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 12), nn.Linear(12, 96, bias=False)
        self.head.weight = self.embed.weight
        self.net = make_net().blocks[0]

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.net(self.embed(tokens)))
        return result


def _tied_to_what_stays_whole(rank: int) -> tuple[Numbers, Numbers]:
    torch.manual_seed(1)
    plain = Tied()
    model = deepcopy(plain)
    rules = [{"patterns": ["head|.*up"], "gather_output": True}]
    divided = {"autotp_size": 2, "partition_config": {"layer_specs": rules}}
    engine, *_ = dslaunch.initialize(
        model=model,
        model_parameters=list(model.named_parameters()),  # of before
        config=make_config(1, tensor_parallel=divided),
    )
    assert model.head.weight is model.embed.weight
    expected = train_plain(plain, loss_of_numbers, token_batches())
    got = train(engine, loss_of_numbers, token_batches(), tp=2)
    engine.destroy()
    return got, expected


def test_a_head_that_is_tied_to_what_stays_whole_stays_whole(ranks: Ranks) -> None:
    for got, expected in ranks(_tied_to_what_stays_whole, world_size=2):
        check(got, expected)


def _made_in_shards(rank: int) -> tuple[Numbers, Numbers]:
    """zero.Init has sharded the parameters before they are divided."""
    config = make_config(3, **RULES)
    with dslaunch.zero.Init(config_dict_or_path=config):
        model = make_net()
    engine, *_ = dslaunch.initialize(model=model, config=config)
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    engine.destroy()
    return got, train_plain(make_net(), loss_of_numbers, number_batches())


def test_a_model_that_was_made_in_shards_is_divided(ranks: Ranks) -> None:
    for got, expected in ranks(_made_in_shards, world_size=4):
        check(got, expected)


def _misfit(rank: int) -> tuple[str, list[str]]:
    """A row whose input is whole, and a pattern that fits nothing."""
    config = make_config(1, tp=2)
    rules = [{"patterns": [r".*\.down\.weight$"], "partition_type": "row"}, {"patterns": ["up"]}]
    config["tensor_parallel"]["partition_config"] = {"layer_specs": rules}
    lines: list[str] = []
    with patch.object(logger, "warning", side_effect=lambda text, *args: lines.append(text % args)):
        engine, *_ = dslaunch.initialize(model=make_net(), config=config)
    with pytest.raises(ConfigError) as caught:
        engine(numbers()[:2])
    engine.destroy()
    return str(caught.value), lines


def test_rules_that_fit_nothing_or_not_together_are_named(ranks: Ranks) -> None:
    for rank, (error, lines) in enumerate(ranks(_misfit, world_size=2)):
        text = "'blocks.0.down' is divided by rows and takes this rank's 24 of 48 elements of its input"
        assert error.startswith(text)
        assert ["patterns 'up' fit the name of no weight" in line for line in lines] == [True] * (rank == 0)


def _one_head_of_keys(rank: int) -> tuple[Numbers, Numbers, str]:
    """Rules that leave attention whole, and those that divide it."""
    plain, model, refused = (make_hugging_face("Llama", num_key_value_heads=1) for _ in range(3))
    config = make_config(1, tp=2)
    rules = [
        {"patterns": [r".*(gate|up)_proj\.weight$"]},
        {"patterns": [r".*down_proj\.weight$"], "partition_type": "row"},
    ]
    config["tensor_parallel"]["partition_config"] = {"layer_specs": rules}
    engine, *_ = dslaunch.initialize(model=model, config=config)
    got = train(engine, loss_of_tokens, token_batches(), tp=2)
    engine.destroy()
    rules += [{"patterns": [r".*(q|k|v)_proj\.weight$"]}]
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=refused, config=config)
    return got, train_plain(plain, loss_of_tokens, token_batches()), str(caught.value)


def test_heads_that_no_rule_divides_may_be_any_number(ranks: Ranks) -> None:
    for got, expected, refused in ranks(_one_head_of_keys, world_size=2):
        check(got, expected)
        assert refused.startswith(
            "tensor_parallel.autotp_size 2 does not divide the model's num_key_value_heads, 1: each rank "
            "computes whole heads; give a divisor of it, or rules for the other layers"
        )


def _again(rank: int) -> None:
    """A model is divided once; a copy of what is whole is plain, and one of parts is refused."""
    plain, model, batches = make_net(), make_net(), number_batches()
    config = make_config(3, **RULES)
    for batch in batches:
        optimizer = {"type": "SGD", "params": {"lr": 0.5}}  # without a momentum to lose
        engine, *_ = dslaunch.initialize(model=model, config={**config, "optimizer": optimizer})
        with dslaunch.zero.GatheredParameters(list(model.parameters())):
            copied = deepcopy(model)
        assert torch.allclose(copied(batch), plain(batch), atol=1e-5)
        _is_near(copied.state_dict(), plain)
        train(engine, loss_of_numbers, [batch], tp=2)
        plain.zero_grad()
        loss_of_numbers(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        torch.optim.SGD(plain.parameters(), lr=0.5).step()
        engine.destroy()
    with pytest.raises(ConfigError, match="module 'first' has this rank's parts of parameters: it is a copy"):
        dslaunch.initialize(model=deepcopy(model), config=make_config(3))
    with pytest.raises(ConfigError, match="the ds_config's section tensor_parallel is another one now"):
        dslaunch.initialize(model=model, config=make_config(3, tp=2))


def test_a_divided_model_is_not_divided_again(ranks: Ranks) -> None:
    ranks(_again, world_size=4)


def _after_a_mistake(rank: int) -> tuple[Numbers, Numbers, list[str]]:
    """What cannot be divided leaves the model whole, which then trains with Adagrad."""
    plain, model = make_net(), make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = []
    stepped = torch.optim.Adam(model.parameters(), lr=0.0)
    loss_of_numbers(model, numbers()).backward()
    stepped.step()
    parts_that_do_not_fit = {"patterns": [r"last\.weight$"], "gather_output": True}  # of one row
    rules = RULES["tensor_parallel"]["partition_config"]["layer_specs"]  # type: ignore[index]
    bad = {"layer_specs": [*rules, parts_that_do_not_fit]}
    config = make_config(1, tensor_parallel={"autotp_size": 2, "partition_config": bad})
    for given, optimizer in ((config, None), (make_config(1, **RULES), stepped)):
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(model=model, optimizer=optimizer, config=given)
        said.append(str(caught.value))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    optimizers = [torch.optim.Adagrad(one.parameters(), lr=0.1) for one in (model, plain)]
    config = make_config(1, **RULES)
    del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=model, optimizer=optimizers[0], config=config)
    expected = []
    for batch in number_batches():
        optimizers[1].zero_grad()
        loss = loss_of_numbers(plain, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizers[1].step()
        expected.append((loss.item(), float(norm)))
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    engine.destroy()
    return got, expected, said


def test_what_cannot_be_divided_leaves_the_model_whole(ranks: Ranks) -> None:
    for got, expected, (shape, states) in ranks(_after_a_mistake, world_size=4):
        assert "'last.weight' of shape (1, 12) cannot be divided over 2 ranks along dimension 0" in shape
        assert "the Adam given to initialize() has taken steps with whole parameters" in states
        check(got, expected, limit=1e-5)


def _by_torch(rank: int, stage: int, is_sequence: bool) -> tuple[Numbers, Numbers, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    plain, model = make_net(), make_net()
    parallelize_module(model, mesh, torch_plan(is_sequence=is_sequence))
    for more in (RULES["tensor_parallel"], {"autotp_size": 2, "vocab_parallel_lm_head": True}):
        with pytest.raises(ConfigError, match=r"cannot be followed: parallelize_module\(\) has divided"):
            dslaunch.initialize(model=model, config=make_config(stage, tensor_parallel=more))
    if is_sequence:
        cut_sequence(model, mesh)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage))
    expected = train_plain(plain, loss_of_numbers, number_batches())
    got = train(engine, loss_of_numbers, number_batches(), tp=2)
    engine(numbers()[:2])
    here = [  # between forward and backward
        unit.name
        for unit in engine._model.units
        for sub_buffer in unit.sub_buffers
        if sub_buffer.is_sharded and sub_buffer.param_shard.values.flat.untyped_storage().size()
    ]
    engine._model.reshard_idle()
    _is_near(_whole(model), plain)
    engine.destroy()
    return got, expected, here


@pytest.mark.parametrize(("stage", "is_sequence"), [(2, False), (3, True)])
def test_a_model_that_torch_has_divided_trains_as_it_is(ranks: Ranks, stage: int, is_sequence: bool) -> None:
    for got, expected, here in ranks(_by_torch, stage, is_sequence, world_size=4):
        check(got, expected)
        # What autograd saves of a DTensor keeps no memory of a unit; those of the end stay here.
        assert not {"first", "blocks.0", "blocks.1"} & set(here)


def _compiled(rank: int) -> tuple[Numbers, Numbers]:
    plain, model = make_net(depth=9), make_net(depth=9)  # one more than torch compiles one function for
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, **RULES))
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        warnings.simplefilter("ignore")  # of torch's own
        torch._dynamo.reset()
        engine.compile(backend="eager")
        got = train(engine, loss_of_numbers, number_batches(), tp=2)
    engine.destroy()
    return got, train_plain(plain, loss_of_numbers, number_batches())


@pytest.mark.slow
def test_divided_layers_of_a_compiled_model_stay_out_of_its_graphs(ranks: Ranks) -> None:
    for got, expected in ranks(_compiled, world_size=2):
        check(got, expected)


def _refused_by_torch(rank: int) -> list[str]:
    """Plans of torch's that are of another axis, of two, or of two sizes, and what is not a plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    all_ranks = init_device_mesh("cpu", (4,))
    said = []
    for meshes in ([mesh["dp"]], [mesh], [mesh["tp"], all_ranks], [], [mesh["tp"]]):
        model = make_net()
        for block, over in zip(model.blocks, meshes, strict=False):
            placements = [*[Replicate()] * (over.ndim - 1), Shard(0)]
            block.up.weight = nn.Parameter(distribute_tensor(block.up.weight.detach(), over, placements))
        if not meshes:
            fully_shard(model, mesh=all_ranks)
        elif meshes == [mesh["tp"]]:
            dslaunch.tp_model_init(model, 4)
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(model=model, config=make_config(1))
        said.append(str(caught.value))
    return said


def test_plans_of_torch_that_are_not_of_neighbours_are_refused_by_name(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(_refused_by_torch, world_size=4)):
        axis, two_axes, two_sizes, shards, contradiction = said
        others, own = [rank % 2, rank % 2 + 2], [rank - rank % 2, rank - rank % 2 + 1]
        assert f"is a DTensor over ranks {others}, and this rank's axis tp is {own}" in axis
        assert "is a DTensor on a mesh with axes ('dp', 'tp')" in two_axes
        assert "is divided over 2 ranks and parameter 'blocks.1.up.weight' over 4" in two_sizes
        assert "fully_shard() has divided the model over ranks" in shards
        assert "tp_model_init(tp_size=4) contradicts the model, which is divided over 2" in contradiction


# ---- checkpoints and whole tensors


def _through_layouts(rank: int, layouts: list[tuple[int, int]], folder: str) -> None:
    for number, (tp, stage) in enumerate(layouts):
        adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
        model = make_hugging_face("Llama", seed=number)
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage, tp=tp, **adam))
        if number == 0:
            train(engine, loss_of_tokens, token_batches(), tp=tp)
        else:
            engine.load_checkpoint(folder, tag=f"number{number - 1}")
        engine.save_checkpoint(folder, tag=f"number{number}")
        engine.destroy()


def test_a_checkpoint_of_any_layout_loads_at_any_other_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    layouts = [(2, 1), (1, 3), (2, 3), (1, 0)]
    ranks(_through_layouts, layouts, str(tmp_path), world_size=4)
    first, *others = (
        open_checkpoint(open_store(tmp_path), f"number{index}") for index in range(len(layouts))
    )
    shapes = {name: tuple(param.shape) for name, param in make_hugging_face("Llama").named_parameters()}
    assert {name: tuple(first.tensors()[f"model.{name}"].size) for name in shapes} == shapes
    for other in others:
        assert other.tensors().keys() == first.tensors().keys()
        assert all(torch.equal(other.tensor(name), first.tensor(name)) for name in first.tensors())


def _whole_tensors(rank: int, stage: int, folder: str) -> None:
    plain, model = make_hugging_face("Llama"), make_hugging_face("Llama")
    config = make_config(stage, tp=2, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0}})
    engine, *_ = dslaunch.initialize(model=model, config=config)
    own = tokens().chunk(2)[rank // 2]
    for micro_batch in own.chunk(2):
        engine.backward(loss_of_tokens(engine, micro_batch))
        if micro_batch is not own.chunk(2)[1]:
            engine.set_gradient_accumulation_boundary(True)
    loss_of_tokens(plain, tokens()).backward()
    named, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, param in named.items():
        grad = safe_get_full_grad(param)
        there = expected[name].grad
        assert grad is not None
        assert there is not None
        assert torch.allclose(grad, there, atol=1e-6), name
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    engine.step()
    for name, param in named.items():
        state = safe_get_full_optimizer_state(param, "exp_avg")
        assert state is not None
        assert torch.allclose(state, optimizer.state[expected[name]]["exp_avg"], atol=1e-6), name
    state_dict = {name: value.clone() for name, value in engine.state_dict().items()}
    for name, value in plain.state_dict().items():
        assert torch.allclose(state_dict[name], value, atol=2e-5), name
    with pytest.raises(ConfigError, match=r"state_dict\(\) of the module would hold this rank's part"):
        model.state_dict()
    _write_weights(engine, state_dict, folder)
    _write_values(engine, rank, named, state_dict)
    if stage == 3:  # else a load that fails in the middle bars the engine
        _fail_to_load(engine, named)
    engine.destroy()


def _write_weights(engine: dslaunch.Engine, expected: dict[str, Tensor], folder: str) -> None:
    import transformers
    from safetensors.torch import load_file

    for name in ("model.safetensors", "model.bin"):
        engine.save_16bit_model(folder, name)
    if engine.global_rank == 0:
        files = load_file(f"{folder}/model.safetensors"), torch.load(f"{folder}/model.bin")
        assert all(torch.equal(file[name], value) for file in files for name, value in expected.items())
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=False).save_pretrained(folder)
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def _fail_to_load(engine: dslaunch.Engine, named: dict[str, Any]) -> None:
    """What a load has written before it failed is not taken."""

    def load(src: Any, dst: nn.Module) -> None:
        for param in dst.parameters():
            param.zero_()
        raise RuntimeError("in the middle")

    before = _whole(engine.module)
    with pytest.raises(RuntimeError, match="in the middle"):
        engine.load_module_state_dict({"module": {}}, custom_load_fn=load)
    assert all(torch.equal(value, before[name]) for name, value in _whole(engine.module).items())


def _write_values(
    engine: dslaunch.Engine, rank: int, named: dict[str, Any], before: dict[str, Tensor]
) -> None:
    """What a program writes to whole tensors, each rank takes its part of."""
    with dslaunch.zero.GatheredParameters(list(named.values()), modifier_rank=3):
        for name, param in named.items():
            assert param.shape == before[name].shape
            if rank == 3:
                param.data.mul_(2)
    assert all(torch.equal(value, 2 * before[name]) for name, value in _whole(engine.module).items())
    engine.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in _whole(engine.module).items())
    for name, param in named.items():
        safe_set_full_fp32_param(param, 3 * before[name])
    assert all(torch.equal(value, 3 * before[name]) for name, value in engine.state_dict().items())
    for name, param in named.items():
        safe_set_full_optimizer_state(param, 5 * before[name], "exp_avg")
        state = safe_get_full_optimizer_state(param, "exp_avg")
        assert state is not None
        assert torch.equal(state, 5 * before[name])
    engine.load_state_dict(before)
    engine.backward(loss_of_tokens(engine, tokens()[:2]))
    for name, param in named.items():
        safe_set_full_grad(param, torch.full_like(before[name], 2.0))
    grads = [safe_get_full_grad(param) for param in named.values()]
    assert all(grad is not None and bool((grad == 2.0).all()) for grad in grads)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_programs_read_and_write_are_whole_tensors(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    ranks(_whole_tensors, stage, str(tmp_path), world_size=4)


def _write_between_steps(rank: int) -> None:
    """What is written to a whole parameter is what the next step begins with, also after an error."""
    model = make_net()
    still = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "bf16": {"enabled": True}}
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, **RULES, **still))

    def step() -> None:
        for micro_batch in numbers().to(torch.bfloat16).chunk(2):
            engine.backward(loss_of_numbers(engine, micro_batch.chunk(2)[rank // 2]))
            engine.step()

    for _ in range(2):  # the first one compares all values with what is known of them
        step()
    before = _whole(model)
    with suppress(KeyError), torch.no_grad(), dslaunch.zero.GatheredParameters(model.parameters()):
        for name, param in model.named_parameters():
            is_divided = name.endswith(("up.weight", "up.bias", "down.weight")) or name.startswith("first")
            (param.data if is_divided else param).mul_(2)  # torch does not count what goes through .data
        raise KeyError
    step()
    for name, value in _whole(model).items():
        assert torch.equal(value.bfloat16(), 2 * before[name].bfloat16()), name
    engine.destroy()


def test_what_is_written_to_whole_parameters_counts_in_the_next_step(ranks: Ranks) -> None:
    ranks(_write_between_steps, world_size=4)


# ---- what ranks that compute together must agree on, and what is refused


def _replace_layer(model: Any, what: str) -> None:
    layer = model.model.layers[0]
    if what == "adapter":
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    elif what == "a forward of its own":
        layer.mlp.down_proj.forward = torch.tanh
    else:
        model._tp_plan = {**model._tp_plan, "lm_head": "sequence_parallel"}


def _of_inputs(rank: int, what: str) -> str:
    """What is said of inputs of another length in forward 3, which compares no values, and of other values
    in the third micro batch.
    """
    engine, *_ = dslaunch.initialize(model=make_hugging_face("Llama"), config=make_config(1, tp=2))
    for step in range(2):
        engine.backward(loss_of_tokens(engine, tokens(step)[:2]))
        engine.step()
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        last = tokens()[:2, : LENGTH - rank] if what == "length" else tokens(step=rank)[:2]
        engine.backward(loss_of_tokens(engine, last))
        engine.step()
        assert what == "values"  # which come with the norm
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "length",
            "were given different inputs in forward 3: [1]['input_ids'] is (2, 12) torch.int64 on rank 0 "
            "and is (2, 11) torch.int64 on rank 1; give both the same samples",
        ),
        ("values", "were given different values in forward 3; give both the same samples"),
    ],
)
def test_ranks_that_compute_together_are_seen_to_have_the_same_inputs(
    ranks: Ranks, what: str, text: str
) -> None:
    for error in ranks(_of_inputs, what, world_size=2):
        assert text in error


def _of_losses(rank: int, what: str, stage: int) -> str:
    """What is said of a loss that each rank makes of the same outputs in its own way."""
    engine, *_ = dslaunch.initialize(model=make_hugging_face("Llama"), config=make_config(stage, tp=2))
    torch.manual_seed(rank)
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        for step in range(2):
            logits = engine(input_ids=tokens(step)[:2]).logits
            labels = tokens(step)[:2]
            logits = nn.functional.dropout(logits, 0.9) if what == "noise" else logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            engine.backward(loss[: 12 * (1 + rank)].sum() if what == "weights" else loss.mean())
            engine.step()
    assert engine.global_steps == 0
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(("what", "stage"), [("weights", 1), ("noise", 3)])
def test_ranks_that_compute_together_are_seen_to_make_the_same_loss(
    ranks: Ranks, what: str, stage: int
) -> None:
    for error in ranks(_of_losses, what, stage, world_size=2):
        assert "(tensor_parallel.autotp_size 2), and have different gradients of what these put out" in error


def _told_of_parts(rank: int) -> list[list[str]]:
    """What is said in a forward with labels, in one without gradients, and in two of which a program might
    compute the loss.
    """
    engine, *_ = dslaunch.initialize(model=make_hugging_face("Llama"), config=make_config(1, **VOCABULARY))
    found: list[list[str]] = []
    with patch.object(logger, "warning", side_effect=lambda text, *args: found[-1].append(text % args)):
        for has_labels, is_trained in ((True, True), (False, False), (False, True), (False, True)):
            found.append([])
            with torch.set_grad_enabled(is_trained):
                engine(input_ids=tokens()[:2], labels=tokens()[:2] if has_labels else None)
    engine.destroy()
    return found


def test_a_loss_that_would_take_parts_of_the_logits_for_all_is_warned_of(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(_told_of_parts, world_size=2)):
        assert [len(one) for one in found] == [0, 0, int(rank == 0), 0]
        assert rank or "its output has 48 of 96 logits, those of this rank" in found[2][0]


def _copy_with_its_loss(rank: int) -> tuple[float, float]:
    """A rank computes the loss of a plain copy by itself."""
    plain, model = make_hugging_face("Llama"), make_hugging_face("Llama")
    engine, *_ = dslaunch.initialize(model=model, config=make_config(3, **VOCABULARY))
    with dslaunch.zero.GatheredParameters(model.parameters()):
        copied = deepcopy(model)
    engine.destroy()
    if rank:
        return 0.0, 0.0
    return loss_of_tokens(copied, tokens()).item(), loss_of_tokens(plain, tokens()).item()


def test_a_copy_of_a_model_whose_logits_are_in_parts_is_plain(ranks: Ranks) -> None:
    for got, expected in ranks(_copy_with_its_loss, world_size=2):
        assert abs(got - expected) <= 1e-6


def _error(rank: int, what: str | int) -> str:
    config = make_config(1, tp=2)
    model: Any = make_hugging_face("Llama")
    if isinstance(what, int):
        engine, *_ = dslaunch.initialize(model=model, config=config)
        for _ in range(1, what):
            engine(input_ids=tokens()[:2])
        with pytest.raises(ConfigError) as caught:
            engine(input_ids=tokens(step=rank)[:2])
        engine.destroy()
        return str(caught.value)
    if what == "heads":
        model = make_hugging_face("Llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=24)
    elif what == "no plan":
        model = make_net()
    elif what == "no layer":
        config["tensor_parallel"]["partition_config"] = {"layer_specs": [{"patterns": ["nothing"]}]}
    elif what in ("adapter", "a forward of its own", "style"):
        _replace_layer(model, what)
    elif what == "another model":
        model = make_hugging_face("Llama", num_hidden_layers=1 + rank % 2)
    elif what == "a size that divides nothing":
        config["tensor_parallel"]["autotp_size"] = 3
    elif what == "another dtype":
        dslaunch.tp_model_init(model, tp_size=2, dtype=torch.float16)
        config["bf16"] = {"enabled": True}
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            1,
            "(tensor_parallel.autotp_size 2), and were given different inputs in forward 1: "
            "[1]['input_ids'] has other values;",
        ),
        (
            8,
            "(tensor_parallel.autotp_size 2), and were given different inputs in forward 8: [1]['input_ids']",
        ),
        ("heads", "autotp_size 2 does not divide the model's num_attention_heads, 3"),
        ("no plan", "Net does not say how its layers are divided"),
        ("no layer", "partition_config.layer_specs fits no layer of this model"),
        ("adapter", "divides 'model.layers.0.self_attn.q_proj' as a Linear, and it is a Sequential"),
        (
            "a forward of its own",
            "computes 'model.layers.0.mlp.down_proj' as a Linear by rows, and it has",
        ),
        ("style", "'lm_head' the style 'sequence_parallel', which is not available"),
        ("another model", "rank 1 and rank 0 were given different models to divide"),
        ("a size that divides nothing", "tensor_parallel.autotp_size 3 does not divide the 2 ranks"),
        ("another dtype", "tp_model_init(dtype=torch.float16) contradicts the ds_config"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(ranks: Ranks, what: str | int, text: str) -> None:
    for error in ranks(_error, what, world_size=2):
        assert text in error


def _of_parts_that_do_not_fit(rank: int) -> str:
    """Doge's plan puts the parts of dt_proj together, and its masks meet the heads of each rank."""
    engine, *_ = dslaunch.initialize(model=make_hugging_face("Doge"), config=make_config(1, tp=2))
    with pytest.raises(ConfigError) as caught:
        engine(input_ids=tokens()[:2])
    engine.destroy()
    return str(caught.value)


def test_layers_whose_parts_do_not_fit_together_are_named(ranks: Ranks) -> None:
    for said in ranks(_of_parts_that_do_not_fit, world_size=2):
        assert said.startswith("'model.layers.0.self_attn' cannot compute with the parts of its parameters")
        assert "'dt_proj.weight', 'o_proj.weight' and leaves 'A', 'q_norm.weight'" in said


def _launched(rank: int) -> str:
    """`dslaunch --mesh tp=2` is a spelling of autotp_size."""
    with patch.dict(os.environ, {"DSLAUNCH_MESH": "dp=1,tp=2"}):
        engine, *_ = dslaunch.initialize(model=make_hugging_face("Llama"), config=make_config(1))
        assert (engine.dp_world_size, engine.mp_world_size) == (1, 2)
        engine.destroy()
    with patch.dict(os.environ, {"DSLAUNCH_MESH": "dp=1,pp=2"}), pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=make_net(), config=make_config(1))
    return str(caught.value)


def test_the_launcher_says_over_how_many_ranks_layers_are_divided(ranks: Ranks) -> None:
    for said in ranks(_launched, world_size=2):
        assert "dslaunch --mesh says pp=2, and the model, which is not in stages, says pp=1;" in said


def _requests(rank: int) -> list[str]:
    model, said = make_net(), []
    dslaunch.tp_model_init(model, tp_size=2)
    group = dist.new_group([0, 1])
    for given in (
        {"tp_size": 1},
        {"tp_size": 1, "tp_group": group},
        {"tp_size": True},
        {"tp_size": 2, "tp": 2},
    ):
        with pytest.raises(ConfigError) as caught:
            dslaunch.tp_model_init(model, **given)
        said.append(str(caught.value))
    assert dslaunch.tp_model_init(model, tp_size=2, tp_group=group) is model
    return said


def test_tp_model_init_refuses_what_initialize_could_not_do(ranks: Ranks) -> None:
    for two_sizes, group, size, unknown in ranks(_requests, world_size=2):
        assert "tp_model_init() was called with tp_size=2" in two_sizes
        assert "tp_model_init(tp_group=...) has ranks [0, 1]; with tp_size=1" in group
        assert "tp_model_init(tp_size=True): must be a whole number" in size
        assert "tp_model_init() takes no tp; it takes tp_group" in unknown


def _differing(rank: int, what: str) -> str:
    config, model = make_config(1, tp=2), make_net()
    config["tensor_parallel"]["partition_config"] = {"layer_specs": [{"patterns": ["blocks.*up"]}]}
    if rank == 1 and what == "none":
        del config["tensor_parallel"]
    elif rank == 1 and what == "gather_output":
        config["tensor_parallel"]["partition_config"]["layer_specs"][0]["gather_output"] = True
    elif what == "sequences":
        config["sequence_parallel_size"], config["tensor_parallel"] = 1 + rank, None
    elif rank == 1 and what == "requires_grad":
        model.blocks[1].norm.requires_grad_(False)
    elif rank == 1:
        model = model.bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=model, config=config)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "none",
            "rank 1 and rank 0 were given different settings: tensor_parallel is left out on rank 1 and",
        ),
        ("gather_output", "rank 1 and rank 0 were given different settings: tensor_parallel is {"),
        ("dtype", "rank 1 and rank 0 were given different models to divide: names, shapes, dtypes and "),
        ("requires_grad", "rank 1 and rank 0 were given different models to divide: names, shapes, dtypes "),
        (
            "sequences",
            "rank 1 and rank 0 were given different settings: sequence_parallel_size is 2 on rank 1",
        ),
    ],
)
def test_ranks_that_would_divide_differently_end_with_an_error(ranks: Ranks, what: str, text: str) -> None:
    for error in ranks(_differing, what, world_size=2):
        assert error.startswith(text)


def _bytes(rank: int, tp: int) -> tuple[int, int]:
    """What a rank sends of activations in a forward and a backward, and what the formula says."""
    model = make_hugging_face("Llama", num_key_value_heads=4)
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, tp=tp))
    batch = tokens()[:2]
    engine(input_ids=batch)  # the first one compares what the ranks were given
    before = engine._wire.meter.bytes_by_kind().get("all_reduce", 0)
    loss = loss_of_tokens(engine, batch)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss)
    sent = engine._wire.meter.bytes_by_kind()["all_reduce"] - before
    engine.destroy()
    activations = batch.numel() * SIZES["hidden_size"] * 4
    blocks = SIZES["num_hidden_layers"] * 8 * (tp - 1) * activations // tp
    ends = (
        2 * 2 * (tp - 1) * activations // tp
    )  # the embedding's output, and the gradient of the head's input
    return sent, blocks + ends


@pytest.mark.parametrize("tp", [2, 4])
def test_the_bytes_on_the_wire_are_those_of_the_formula(ranks: Ranks, tp: int) -> None:
    for sent, expected in ranks(_bytes, tp, world_size=4):
        assert sent == expected


def _dropout(rank: int) -> Numbers:
    """Ranks that compute one layer together draw the same numbers, whatever each was seeded with."""
    model = make_hugging_face("Llama")
    torch.manual_seed(100 + rank)
    engine, *_ = dslaunch.initialize(model=dslaunch.tp_model_init(model, 2), config=make_config(1))
    drawn = torch.rand(3)
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, drawn)
    assert torch.equal(told[0], told[1])
    assert torch.equal(told[2], told[3])
    assert not torch.equal(told[0], told[2])
    groups = engine.get_tensor_parallel_rank(), engine.autotp_size(), engine.get_data_parallel_rank()
    assert groups == (rank % 2, 2, rank // 2)
    assert (process_groups.model_parallel_rank(), process_groups.model_parallel_world_size()) == (rank % 2, 2)
    assert process_groups.data_parallel_rank() == rank // 2
    for group, ranks_of_group in (
        (process_groups.model_parallel_group(), [rank - rank % 2, rank - rank % 2 + 1]),
        (process_groups.data_parallel_group(), process_groups.data_parallel_group_ranks()),
    ):
        assert dist.get_process_group_ranks(group) == ranks_of_group
    assert process_groups.data_parallel_group_ranks() == [rank % 2, rank % 2 + 2]
    assert process_groups.model_parallel_src_rank() == rank - rank % 2
    engine.destroy()
    return []


def test_ranks_that_compute_together_draw_the_same_random_numbers(ranks: Ranks) -> None:
    ranks(_dropout, world_size=4)
