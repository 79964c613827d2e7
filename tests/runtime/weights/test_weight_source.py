"""dslaunch.WeightSource: weights to a server by vLLM's protocol, refused by name, and proved by a digest."""

from __future__ import annotations

import sys
import types
from abc import ABC
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError, WeightSource
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks
from tests.runtime.weights.test_model_names import make, written
from tests.runtime.weights.vllm_stand_in import Refused, Sender, StandIn, served


def _loss(engine: Any, step: int) -> Tensor:
    ids = torch.randint(48, (2, 6), generator=torch.Generator().manual_seed(step))
    loss: Tensor = engine(input_ids=ids, labels=ids).loss
    return loss


def _synced(rank: int, folder: str) -> None:
    model = make("Mixtral")
    shapes = {name: tuple(value.shape) for name, value in written(model, folder).items()}
    config = make_config(stage=3, train_batch_size=4, optimizer={"type": "AdamW", "params": {"lr": 0.0}})
    engine, *_ = dslaunch.initialize(model=model, config=config)
    source = WeightSource(engine, with_digest=True)
    source.check(folder)
    receiver = StandIn(shapes)
    with ExitStack() as stack:
        sender = Sender(source, stack.enter_context(served(receiver)) if rank == 0 else None)
        versions = []
        for step, lr in enumerate((0.0, 0.0, 0.1)):  # a step changes what is sent, unless its rate is 0
            sender.send_weights()
            versions.append(str(source.digest))
            if rank == 0:
                assert receiver.weights.keys() == shapes.keys()
                assert receiver.version == versions[-1]
            engine.optimizer.param_groups[0]["lr"] = lr
            engine.backward(_loss(engine, step))
            engine.step()
        sender.send_weights()
        versions.append(str(source.digest))
        assert versions[0] == versions[1] == versions[2] != versions[3]
        _fail(rank, receiver, sender)
        sender.send_weights()  # no rank has been left in a collective
        assert str(source.digest) == versions[3]


def _fail(rank: int, receiver: StandIn, sender: Sender) -> None:
    """A tensor that is damaged on its way, and one that the server does not know, end the sync by name."""
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    if rank:
        sender.send_weights()
        sender.send_weights()
        return
    receiver.damages = name
    with pytest.raises(ConfigError, match=rf"'{name}' was sent as float32 \[24, 16\] .* arrived as"):
        sender.send_weights()
    receiver.damages = None
    shape = receiver.shapes.pop(name)
    with pytest.raises(Refused, match=rf"'{name}' \[24, 16\] is not of this model"):
        sender.send_weights()
    receiver.shapes[name] = shape


def test_a_server_gets_the_weights_of_each_sync_and_refuses_by_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_synced, str(tmp_path), world_size=2)


def _checked(rank: int, folder: str) -> list[str]:
    written(make("Llama"), folder)
    said = []
    for kind, known in (
        ("Mixtral", folder),
        ("Llama", {"model.layers.0.self_attn.q_proj.weight": (2, 2)}),
    ):
        engine, *_ = dslaunch.initialize(model=make(kind), config=make_config(stage=3))
        with pytest.raises(ConfigError) as caught:
            WeightSource(engine).check(known)
        said.append(str(caught.value))
        engine.destroy()
    return said


def test_names_and_shapes_are_compared_before_anything_is_sent(ranks: Ranks, tmp_path: Path) -> None:
    for unknown, other in ranks(_checked, str(tmp_path), world_size=2):
        assert unknown.startswith("the receiver has no tensor 'model.layers.0.block_sparse_moe")
        assert "'model.layers.0.self_attn.q_proj.weight' is [16, 16] here and [2, 2] at the receiver" in other


def test_it_is_a_source_of_vllm_where_that_is_installed() -> None:
    transfer: Any = types.ModuleType("vllm.distributed.weight_transfer")
    transfer.WeightSource = type("WeightSource", (ABC,), {})
    transfer.ParamMeta = type("ParamMeta", (), {})
    modules = {"vllm": types.ModuleType("vllm"), "vllm.distributed": types.ModuleType("vllm.distributed")}
    with (
        mock.patch.dict(sys.modules, {**modules, transfer.__name__: transfer}),
        mock.patch("dslaunch.runtime.weights.weight_source.find_spec"),
    ):
        source = WeightSource(mock.Mock())
    assert isinstance(source, transfer.WeightSource)
    assert source.held_names() is None
