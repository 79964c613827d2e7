"""Several kinds of parallelism at once: losses, norms and every parameter are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.mesh.domain import Domains
from dslaunch.runtime.pipeline.layers import TiedLayerSpec
from dslaunch.shared.axes import Axes
from tests.exhaustive import few
from tests.runtime.ranks import Ranks
from tests.runtime.training.axes import (
    EXPERTS,
    MICRO,
    SIZE,
    Experts,
    Layout,
    Trained,
    batches,
    config_of,
    data,
    make_engine,
    make_judge,
    specs,
    train,
    values_of,
)


def _train(rank: int, layout: Layout) -> Trained:
    engine = make_engine(layout)
    losses, norms = train(engine, layout)
    values = {name: value.cpu() for name, value in values_of(engine).items()}
    engine.destroy()
    return losses, norms, values


def test_another_order_changes_where_ranks_lie_and_nothing_else(ranks: Ranks) -> None:
    """Losses, norms and parameters are those of the default order, bit by bit."""
    usual, other = Layout(pp=2, tp=2), Layout(pp=2, tp=2, order=("tp", "pp"))
    expected = ranks(_train, usual, world_size=4)
    for rank, (losses, norms, values) in enumerate(ranks(_train, other, world_size=4)):
        same = usual.axes.rank_at(**other.axes.coordinates(rank))
        assert (losses, norms) == expected[same][:2]
        assert values.keys() == expected[same][2].keys()
        assert all(torch.equal(value, expected[same][2][name]) for name, value in values.items())


def _written(rank: int, layout: Layout, writer: int) -> dict[str, bool] | None:
    """One of the ranks that hold a stage's layers writes to an expert that is number 0 for it; the ranks of
    another stage take no part.
    """
    engine = make_engine(layout)
    holders = layout.axes.line_of(rank, ("dp", "sp", "tp"))
    if rank >= len(holders) * (layout.pp - 1):
        (param,) = [
            one for name, one in engine.module.named_parameters() if "5." in name and ".0.2.bias" in name
        ]
        with dslaunch.zero.GatheredParameters([param], modifier_rank=writer):
            if holders.index(rank) == writer:
                param.data.fill_(7.0)
    found = {
        name.split("deepspeed_experts.")[1][0]: bool((value == 7.0).all())
        for name, value in values_of(engine).items()
        if name.startswith("5.") and name.endswith(".2.bias")
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("layout", "writer"),
    [
        (Layout(dp=4, ep=2, stage=1), 3),
        (Layout(dp=2, tp=2, ep=2, stage=3), 3),
        (Layout(pp=2, tp=2, stage=3), 1),
    ],
    ids=str,
)
def test_what_a_rank_writes_reaches_those_that_hold_the_same(
    ranks: Ranks, layout: Layout, writer: int
) -> None:
    held = writer // layout.tp % layout.ep * EXPERTS // layout.ep
    for found in ranks(_written, layout, writer, world_size=4):
        assert found == {number: int(number) == held for number in found}


MESHES: list[tuple[Layout, dict[str, Any], str]] = [
    (
        Layout(dp=2, sp=2, ep=2),
        {"mesh": {"ep": 4}},
        "ep=4 in dslaunch --mesh or the ds_config's section mesh, and a layer of the model has ep_size 2",
    ),
    (
        Layout(sp=2, dp=2),
        {"mesh": {"sp": 4}},
        "the ds_config's section mesh says sp=4, and the ds_config's sequence_parallel_size says sp=2",
    ),
    (
        Layout(sp=2, dp=2, ep=2),
        {"mesh": {"ep": 3}},
        "leave 4 ranks (dp x sp) with the same layers, which ep=3 does not divide",
    ),
    (
        Layout(dp=2, tp=2),
        {"mesh": {"order": ["tp"]}},
        "the ds_config's section mesh: the order tp leaves out dp, which has 2 ranks; name all axes",
    ),
    (
        Layout(pp=2, dp=2),
        {"mesh": {"order": ["dp", "pp"]}},
        "with the order pp, dp, sp, tp of axes, and the ds_config's tensor_parallel.autotp_size is 1, its "
        "sequence_parallel_size 1, and the order tp, dp, sp, pp; build it with "
        "topology=ProcessTopology(axes=['data', 'pipe'], dims=[2, 2])",
    ),
    (
        Layout(dp=2, sp=2),
        {"mesh": {"order": ["sp", "dp"]}},
        "module '1.over_ranks' has attention over ranks [",
    ),
    (
        Layout(pp=2, dp=2),
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        "expert_parallel.autoep_size 2 with a PipelineModule",
    ),
    (
        Layout(pp=2, dp=2, stage=3),
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        "mics_shard_size 2 with a PipelineModule",
    ),
    (
        Layout(dp=4, ep=2, stage=3),
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        "mics_shard_size 2 and experts over 2 ranks",
    ),
]


def _refused(rank: int) -> list[str]:
    said = []
    for layout, changes, _ in MESHES:
        with pytest.raises(ConfigError) as caught:
            make_engine(layout, **changes)
        said.append(str(caught.value))
    return said


def test_what_does_not_go_together_is_refused(ranks: Ranks) -> None:
    for rank in ranks(_refused, world_size=4):
        for (layout, changes, said), found in zip(MESHES, rank, strict=True):
            assert said in found, (layout, changes)


def _saved(rank: int, layout: Layout, folder: str) -> dict[str, Tensor]:
    engine = make_engine(layout)
    train(engine, layout, steps=1)
    values = values_of(engine)
    engine.save_checkpoint(folder, tag="here")
    engine.save_16bit_model(folder, "model.safetensors")
    engine.destroy()
    return values


def _loaded(rank: int, layout: Layout, folder: str) -> dict[str, Tensor]:
    engine = make_engine(layout)
    engine.load_checkpoint(folder, tag="here")
    values = values_of(engine)
    train(engine, layout, steps=1)
    engine.destroy()
    return values


CHAIN = [
    Layout(pp=2, tp=2, stage=3, order=("tp", "pp")),
    Layout(dp=2, sp=2, ep=4, stage=3),
    Layout(pp=2, dp=2, ep=2, stage=1, schedule="zbv"),
    Layout(pp=2, sp=2, stage=3),
    Layout(dp=2, tp=2, ep=2, stage=2),
]


@pytest.mark.parametrize("number", few(range(len(CHAIN)), lambda number: number in (0, 2)))
def test_a_checkpoint_of_each_is_loaded_at_the_next(ranks: Ranks, tmp_path: Path, number: int) -> None:
    """All parameters are there bit by bit, and so they are in the file of weights."""
    from safetensors.torch import load_file

    saved: dict[str, Tensor] = {}
    for values in ranks(_saved, CHAIN[number], str(tmp_path), world_size=4):
        saved |= values
    assert saved.keys() == dict(make_judge().named_parameters()).keys()
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    seen: set[str] = set()
    for values in ranks(_loaded, CHAIN[number - 1], str(tmp_path), world_size=4):
        for name, value in values.items():
            assert torch.equal(value, saved[name]), name
        seen |= values.keys()
    assert seen == saved.keys()


def _evaluated(rank: int, layout: Layout) -> tuple[Tensor, Tensor] | None:
    """The outputs of the last stage, and those of one process for this rank's part of the sequences."""
    engine = make_engine(layout)
    place, grid = layout.axes.coordinates(rank), engine.grid
    assert (grid.get_data_parallel_id(), grid.get_data_parallel_world_size()) == (place["dp"], layout.dp)
    assert grid.get_sequence_parallel_rank() == place["sp"]
    assert grid.stage_to_global(1 - place["pp"]) == layout.axes.rank_at(**{**place, "pp": 1 - place["pp"]})
    found = engine.eval_batch(batches(layout, 0, engine.device), compute_loss=False)
    with pytest.raises(ConfigError, match="parts 0 and 1 of a sequence differ"):
        engine.train_batch(
            iter([(one[:, place["sp"] :], its) for one, its in batches(layout, 0, engine.device)])
        )
    engine.destroy()
    if found is None:
        return None
    judge = make_judge(layout.sp).eval()
    with torch.no_grad():
        outputs = [judge(one)[0] for one in data(0, size=SIZE * MICRO)[0].chunk(MICRO)]
    return found[0], torch.stack(outputs).mean(0).chunk(layout.sp, dim=1)[place["sp"]]


def test_outputs_of_stages_are_those_of_each_part_of_a_sequence(ranks: Ranks) -> None:
    results = ranks(_evaluated, Layout(pp=2, sp=2), world_size=4)
    assert [one is None for one in results] == [True, True, False, False]
    for found, expected in (one for one in results if one is not None):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def _tied(rank: int) -> tuple[int, str]:
    """The divisor of tied layers where gradients of a sequence's parts are added; then experts among them."""
    domains = Domains(Axes(pp=2, sp=2), shard_size=1, divisor=1)
    domains.tie("tied", stages=(0, 1), params=[one := torch.zeros(())], is_sharded=False)
    divisor = domains.of(one).comm.mesh.divisor
    domains.close()
    spec = TiedLayerSpec("both", Experts, 2, tied_weight_attr=[])
    module = PipelineModule([spec, spec], 2, partition_method="uniform")
    with pytest.raises(ConfigError) as caught:
        dslaunch.initialize(model=module, config=config_of(Layout(pp=2, dp=2)))
    return divisor, str(caught.value)


def test_tied_layers_beside_sequences_and_with_experts(ranks: Ranks) -> None:
    for divisor, said in ranks(_tied, world_size=4):
        assert divisor == 1
        assert said.startswith("the tied layer 'both' lies on the stages 0, 1 and has experts on different")


def _made_sharded(rank: int) -> list[str]:
    """Inside of zero.Init, and of a model that was made inside."""
    said = []
    with pytest.raises(ConfigError) as caught, dslaunch.zero.Init():
        PipelineModule(specs(Layout(pp=2)), 2)
    said.append(str(caught.value))
    with dslaunch.zero.Init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ConfigError) as caught:
        dslaunch.pipeline(model, num_stages=2)
    return [*said, str(caught.value)]


def test_stages_of_layers_that_all_ranks_share_are_refused(ranks: Ranks) -> None:
    for said in ranks(_made_sharded, world_size=2):
        assert all(one.startswith("PipelineModule with layers of zero.Init") for one in said)
