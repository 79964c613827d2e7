"""Experts of Hugging Face models over ranks are trained as one process trains them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.experts.dispatch import ExpertAxis, through_rows
from dslaunch.runtime.mesh.domain import Domains
from dslaunch.shared.axes import Axes
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.experts.models import make_config, start, train, train_plain
from tests.runtime.models import assert_same_bits
from tests.runtime.ranks import Ranks

NEAR = 1e-6  # relative: sums of float32 in another order
VOCAB = 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
    },
}


def make(kind: str, *, seed: int = 0) -> Any:
    """A causal model of transformers, which the workers import late."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def loss_of(model: Any, x: Tensor) -> Tensor:
    """Of tokens that the numbers of a batch are made."""
    tokens = (x.float() * 1e3).long() % VOCAB
    result: Tensor = model(input_ids=tokens, labels=tokens).loss
    return result


def loss_of_few(model: Any, x: Tensor) -> Tensor:
    """All tokens are the same, so most experts get none."""
    tokens = torch.full((len(x), 4), 3)
    result: Tensor = model(input_ids=tokens, labels=tokens).loss
    return result


LOSSES = {"many": loss_of, "few": loss_of_few}


ATTENTION = {
    "autotp_size": 2,
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.(q|k|v)_proj\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
        ]
    },
}
DIVIDED = {"tensor_parallel": ATTENTION, "mesh": {"tp": 2, "ep": 2}}


class Case(NamedTuple):
    """How a model is trained by four ranks."""

    kind: str
    size: int
    stage: int
    loss: str = "many"
    is_divided: bool = False  # its attention is, over two ranks

    @property
    def num_copies(self) -> int:
        return 2 if self.is_divided else 4


CASES = [
    Case("Mixtral", 2, 3, is_divided=True),
    Case("Qwen3Moe", 2, 1),
    Case("Qwen2Moe", 4, 2),
    Case("Mixtral", 4, 3, "few"),
]


def _trained(rank: int, case: Case, folder: str) -> Any:
    model = make(case.kind, seed=rank)  # and gets rank 0's values
    if case.loss == "few":  # this forward uses no parameter where no token is
        model.set_experts_implementation("eager")
    section = {"enabled": True, "autoep_size": case.size}
    engine = start(model, case.stage, expert_parallel=section, **(DIVIDED if case.is_divided else {}))
    numbers = train(engine, LOSSES[case.loss])
    values = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    if folder:
        engine.save_checkpoint(folder, tag="here")
        engine.save_16bit_model(folder, "weights.safetensors")
        weights = load_file(f"{folder}/weights.safetensors")
        assert_same_bits({name: value.clone() for name, value in engine.weights()}, weights)
    if case.stage < 3:
        said = r"this rank's (experts of 'model.layers.0.mlp.experts'|part of parameter)"
        with pytest.raises(ConfigError, match=said):
            model.state_dict()
    engine.destroy()
    return numbers, values


def _trained_cases(rank: int) -> list[Any]:
    return [_trained(rank, case, "") for case in CASES]


def test_experts_of_hugging_face_are_trained_as_in_one_process(ranks: Ranks) -> None:
    """The stacks stay whole where other layers are divided."""
    for case, results in zip(CASES, zip(*ranks(_trained_cases, world_size=4), strict=True), strict=True):
        plain = make(case.kind)
        expected = train_plain(plain, LOSSES[case.loss], world_size=case.num_copies)
        for numbers, values in results:
            for (own, norm), (other, other_norm) in zip(numbers, expected, strict=True):
                assert own == pytest.approx(other, rel=NEAR)
                assert norm == pytest.approx(other_norm, rel=NEAR)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(values[name], param.detach(), rtol=2e-6, atol=2e-6, msg=name)


def _written(rank: int) -> bool:
    engine = start(make("Mixtral"), 1, expert_parallel={"enabled": True, "autoep_size": 2})
    stacks = {name: one for name, one in engine.module.named_parameters() if ".experts." in name}
    with dslaunch.zero.GatheredParameters(list(stacks.values()), modifier_rank=1):
        if rank == 1:
            for one in stacks.values():
                one.data.fill_(3.0)
    state = engine.state_dict()
    engine.destroy()
    return all(bool((state[name] == 3.0).all()) for name in stacks)


def test_what_one_rank_writes_to_a_whole_stack_each_rank_takes_its_part_of(ranks: Ranks) -> None:
    assert ranks(_written, world_size=2) == [True, True]


def _resumed(rank: int, size: int, stage: int, folder: str) -> dict[str, Tensor]:
    engine = start(make("Mixtral", seed=5), stage, expert_parallel={"enabled": size > 1, "autoep_size": size})
    engine.load_checkpoint(folder, tag="here")
    loaded = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.load_state_dict(loaded)
    assert all(torch.equal(loaded[name], value) for name, value in engine.state_dict().items())
    engine.destroy()
    return loaded


def test_stacks_are_saved_whole_and_loaded_over_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    _, trained = ranks(_trained, Case("Mixtral", 2, 3), folder, world_size=4)[0]
    weights = load_file(tmp_path / "weights.safetensors")
    make("Mixtral").load_state_dict(weights)  # all names and shapes of the plain model
    for size, stage, world_size in ((4, 1, 4), (1, 0, 1)):
        for loaded in ranks(_resumed, size, stage, folder, world_size=world_size):
            for name, value in trained.items():
                assert torch.equal(loaded[name], value), name
                assert torch.equal(weights[name], value), name


def _again(rank: int) -> list[str]:
    """Two engines for one model, the first with an optimizer of the program's; then others that cannot be."""
    model = make("Mixtral")
    section = {"enabled": True, "autoep_size": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = make_config(1, expert_parallel=section)
    del config["optimizer"]
    engine, *_ = dslaunch.initialize(model=model, config=config, optimizer=optimizer)
    first = train(engine, loss_of)
    engine.destroy()
    plain = make("Mixtral")
    for (own, _), (other, _) in zip(first, train_plain(plain, loss_of, world_size=2), strict=True):
        assert own == pytest.approx(other, rel=NEAR)
    engine = start(model, 3, expert_parallel=section)
    train(engine, loss_of)
    engine.destroy()
    said = []
    for one, changes in (
        (model, {"expert_parallel": {"enabled": False}}),
        (nn.Linear(3, 3), {"expert_parallel": section}),
        (make("Mixtral"), {"expert_parallel": section, "tensor_parallel": {"autotp_size": 2}}),
        (make("Mixtral"), {"expert_parallel": section, "optimizer": {"type": "Muon", "params": {}}}),
    ):
        with pytest.raises(ConfigError) as caught:
            start(one, 1, **changes)
        said.append(str(caught.value))
    return said


def _divided_twice(rank: int) -> str:
    section = {"enabled": True, "autoep_size": 2}
    with pytest.raises(ConfigError) as caught:
        start(make("Mixtral"), 1, expert_parallel=section, tensor_parallel={"autotp_size": 2})
    return str(caught.value)


def test_experts_that_another_plan_divides_are_refused(ranks: Ranks) -> None:
    for said in ranks(_divided_twice, world_size=4):
        assert said.startswith("the experts of 'model.layers.0.mlp.experts' are on different ranks")


def test_a_second_engine_goes_on_and_what_cannot_be_divided_is_refused(ranks: Ranks) -> None:
    for other, nothing, tensor, muon in ranks(_again, world_size=2):
        assert other.startswith("the experts of this model are divided over 2 ranks already")
        assert nothing.startswith(
            "expert_parallel.autoep_size (or ep of a mesh) 2: the model has no experts that can be divided"
        )
        assert "experts over 2 ranks (ep_size 2)" in tensor
        assert muon.startswith("optimizer Muon sees whole tensors, and parameter 'model.layers.0.mlp.experts")


# ---- the way of tokens


def _rows(rank: int, num_tokens: tuple[int, int]) -> tuple[bool, dict[str, int], int]:
    """Expert e multiplies by e + 1; rank 1 has no tokens, or other ones."""
    domains = Domains(Axes(dp=2), shard_size=1)
    axis = ExpertAxis(size=2)
    axis.join(domains.add_group([(0, 1)], axis="ep_size_2"))
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randn(num_tokens[rank], 3, generator=draw).requires_grad_()
    chosen = torch.randint(0, 4, (num_tokens[rank], 2), generator=draw)

    def experts(rows: Tensor, counts: Tensor) -> Tensor:
        numbers = torch.arange(2 * rank, 2 * rank + 2).repeat_interleave(counts)
        return rows * (numbers + 1).unsqueeze(1)

    done = through_rows(tokens, chosen, axis, 4, experts)
    done.sum().backward()  # type: ignore[no-untyped-call]
    expected = tokens.unsqueeze(1) * (chosen + 1).unsqueeze(2)
    assert tokens.grad is not None
    is_right = torch.equal(done, expected) and torch.equal(
        tokens.grad, (chosen + 1).sum(1, keepdim=True).expand(-1, 3).float()
    )
    sent = domains.wire.meter.bytes_by_kind()
    domains.close()
    return is_right, sent, int((chosen // 2 != rank).sum())


@pytest.mark.parametrize("num_tokens", [(8, 5), (8, 0), (0, 0)])
def test_tokens_come_back_to_their_places_and_only_what_goes_elsewhere_is_sent(
    ranks: Ranks, num_tokens: tuple[int, int]
) -> None:
    results = ranks(_rows, num_tokens, world_size=2)
    away = [one for *_, one in results]
    for (is_right, sent, _), own, others in zip(results, away, reversed(away), strict=True):
        assert is_right
        # two counts; tokens of our own, results of theirs, and in the backward the gradients of both
        assert sent["all_to_all"] == 2 * 8 + 2 * (own + others) * 3 * 4
