"""init_inference(): tokens of transformers with one process, wherever the weights are; what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.inference.options import InferenceOptions
from dslaunch.runtime.inference.speedups import ModelFacts, plan_speedups
from tests.runtime.answering_models import CONFIGS, check_tokens, make_inputs, make_model
from tests.runtime.models import Writer
from tests.runtime.ranks import Ranks

HEADS = {"num_key_value_heads": 4}  # as many as ranks divide them


def _model(name: str) -> Any:
    return make_model(name, **HEADS if "num_key_value_heads" in CONFIGS[name] else {})


def _same_tokens(
    rank: int, names: tuple[str, ...], options: dict[str, Any], tp_size: int = 1, saved: str = ""
) -> None:
    """`saved`: a folder; then weights come from files there into models on the meta device."""
    for name in names:
        if tp_size > 1:
            options = {**options, "tensor_parallel": {"tp_size": tp_size}}
        if saved:
            with torch.device("meta"):
                model = _model(name)
            options["checkpoint"] = str(Path(saved, name))
        else:
            model = _model(name)
        engine = dslaunch.init_inference(model, **options)
        assert not saved or engine.module.generation_config.max_length == 33
        check_tokens(engine, _model(name).eval(), name, rank // tp_size)
        engine.destroy()


def _save(names: tuple[str, ...], folder: Path) -> str:
    for name in names:
        model = _model(name)
        model.generation_config.max_length = 33
        model.save_pretrained(folder / name, max_shard_size="20KB")
    return str(folder)


def _answers(rank: int, folder: str, saved: str) -> None:
    """Run the cases that `make test` has, in one job."""
    _same_tokens(rank, ("GPT2",), {}, 2, saved)
    _same_tokens(rank, ("Llama",), {"offload": "cpu"}, 1, saved)
    _same_tokens(rank, ("Llama", "T5"), {})
    _same_tokens(rank, ("Llama",), {"offload": "nvme", "nvme_path": folder})
    _same_tokens(rank, ("Mixtral", "GPT2"), {}, 2)
    _same_tokens(rank, ("Qwen3",), {"offload": "cpu"}, 2)
    _copies_go_their_own_ways(rank)
    _ranks_of_a_group_must_agree(rank)
    _injection_policies_are_rules(rank)


def _copies_go_their_own_ways(rank: int) -> None:
    """Ranks with copies of a model may be asked as often as each likes."""
    engine = dslaunch.init_inference(_model("Llama"))
    for _ in range(1 + 3 * rank):
        check_tokens(engine, _model("Llama").eval(), "Llama", rank)
        assert engine(**make_inputs("Llama", rank)).logits.grad_fn is None
    engine.destroy()


def _ranks_of_a_group_must_agree(rank: int) -> None:
    engine = dslaunch.init_inference(_model("Llama"), tp_size=2)
    inputs = make_inputs("Llama", 0)
    assert engine.mp_group is not None
    with pytest.raises(
        ConfigError, match=r"tensor_parallel.tp_size 2\), and were given different inputs: .*"
    ):
        engine.generate(inputs["input_ids"] + rank, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"different inputs: \[1\]\['tokenizer_text'\] is text"):
        engine.generate(**inputs, tokenizer_text=str(rank))
    with pytest.raises(IndexError, match=r"embedding 'model.embed_tokens': it has 64 rows, and was given"):
        engine.generate(inputs["input_ids"] + 64, max_new_tokens=2)
    torch.manual_seed(rank)
    with pytest.raises(ConfigError, match="would draw different random numbers, so that their tokens"):
        engine.generate(**inputs, max_new_tokens=2, do_sample=True)
    with pytest.raises(ConfigError, match="different inputs in forward 1"):
        engine(inputs["input_ids"] + rank)
    engine.destroy()
    with pytest.raises(ConfigError, match="tp_size 2 does not divide the model's num_key_value_heads, 1"):
        dslaunch.init_inference(make_model("Llama", num_key_value_heads=1), tp_size=2)
    with pytest.raises(ConfigError, match="tp_size 2: Writer does not say how its layers are divided"):
        dslaunch.init_inference(Writer(), tp_size=2)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(self.up(value).relu())


def _injection_policies_are_rules(rank: int) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(_Block(), nn.Linear(6, 6), _Block())

    value = torch.ones(2, 6)
    engine = dslaunch.init_inference(make(), mp_size=2, injection_policy={_Block: ("down",)})
    torch.testing.assert_close(engine(value), make()(value))
    assert [tuple(one.shape) for one in engine.module.parameters()][:4] == [(4, 6), (4,), (6, 4), (6,)]
    with pytest.raises(
        ConfigError, match=r"no linear layer of a _Block of this model ends in 'out'; .* 0.up"
    ):
        dslaunch.init_inference(make(), mp_size=2, injection_policy={_Block: "out"})
    assert dslaunch.init_inference(make(), injection_policy={_Block: "out"}).mp_group is None


def test_tokens_are_those_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    saved = _save(("GPT2", "Llama"), tmp_path / "saved")
    ranks(_answers, str(tmp_path), saved, world_size=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
@pytest.mark.parametrize(("tp_size", "world_size"), [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4)])
def test_tokens_of_all_models(
    ranks: Ranks, offload: str | None, tp_size: int, world_size: int, is_saved: bool, tmp_path: Path
) -> None:
    options = {} if offload is None else {"offload": offload}
    if offload == "nvme":
        options["nvme_path"] = str(tmp_path)
    saved = _save(tuple(CONFIGS), tmp_path / "saved") if is_saved else ""
    ranks(_same_tokens, tuple(CONFIGS), options, tp_size, saved, world_size=world_size)


def _alone(rank: int) -> None:
    plain = make_model("GPT2").eval()
    tokens = make_inputs("GPT2", 0)
    engine = dslaunch.init_inference(make_model("GPT2").train(), max_out_tokens=6, dtype="bf16")
    assert isinstance(engine, dslaunch.InferenceEngine)
    assert not engine.training
    assert not engine.module.training
    assert engine.config is engine.module.config
    assert engine.mp_group is None
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    logits = engine(**tokens).logits
    torch.testing.assert_close(logits.float(), plain(**tokens).logits, atol=0.02, rtol=0.05)
    with pytest.raises(ConfigError, match=r"Input with size 7 exceeds maximum length of 6: .* max_out_"):
        engine.generate(torch.ones(2, 7, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"nothing is measured; call engine.profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine.generate(**tokens, max_new_tokens=3, do_sample=False)
    assert len(engine.model_times()) == 3
    assert engine.model_times() == []
    engine.to("cpu")
    engine.destroy()
    # In place: the same module, in float32 again.
    again = dslaunch.init_inference(engine.module, dtype=torch.float32)
    assert again(**tokens).logits.dtype is torch.float32
    with pytest.raises(ConfigError, match=r"step.. without an optimizer"):
        again.step()
    without = dslaunch.init_inference(torch.nn.Linear(3, 2))
    assert not hasattr(without, "generate")
    assert without.config is None
    own = dslaunch.init_inference(Writer(), offload="cpu")
    assert torch.equal(own.generate(torch.tensor([[1, 2]]), 3), Writer().generate(torch.tensor([[1, 2]]), 3))


def test_an_engine_has_the_methods_of_deepspeed_s(ranks: Ranks) -> None:
    ranks(_alone, world_size=1)


def test_a_cache_that_does_not_fit_is_named(ranks: Ranks) -> None:
    ranks(_without_room, world_size=1)


def _without_room(rank: int) -> None:
    engine = dslaunch.init_inference(make_model("Llama"))
    inputs = make_inputs("Llama", 0)
    huge = {"max_new_tokens": 10**12, "cache_implementation": "static"}
    with pytest.raises(ConfigError, match=r"static cache does not fit: 2 sequences of 1000000000004 tokens"):
        engine.generate(**inputs, **huge)

    def without_memory(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    engine.module.generate = without_memory
    with pytest.raises(ConfigError, match=r"no memory is left in generate\(\): 2 sequences of 1000000000004"):
        engine.generate(**inputs, max_new_tokens=10**12)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        engine.generate(**inputs, max_new_tokens=1)
    with pytest.raises(ConfigError, match="static cache does not fit: 1 sequences of 1000000000000 tokens"):
        dslaunch.init_inference(make_model("Llama"), min_out_tokens=10**12)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int8"}, "must be torch.float32, .* vLLM and SGLang serve quantized models"),
    ({"dtype": "x"}, r"init_inference\(dtype='x'\): 'x' is none of torch.float32"),
    ({"dtype": 3}, r"init_inference\(dtype=3\): is int, and must be a torch.dtype or its name"),
    ({"tp_size": 3}, "tp_size=3.: 1 ranks are no multiple of it"),
    ({"tpsize": 3}, "no key tpsize; is it tp_size"),
    ({"tp": {"size": 3}}, "no key tensor_parallel.size; "),
    ({"tensor_parallel": 2}, r"init_inference\(tensor_parallel=2\): "),
    ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "contradicts tensor_parallel.tp_size 4"),
    ({"ep_size": 2}, "experts on different ranks do not generate"),
    ({"offload": "disk"}, 'must be "cpu"'),
    ({"offload": "nvme"}, 'give nvme_path="/local_nvme"'),
    ({"nvme_path": "/x"}, 'without offload="nvme" has no effect'),
    ({"offload": "cpu", "nvme_path": "/x"}, "a path is for weights on a disk"),
    ({"offload": "cpu", "zero": {"stage": 3}}, "both say where weights are"),
    ({"max_out_tokens": 0}, r"max_out_tokens=0\): Input should be greater than 0"),
    ({"config": 3}, r"init_inference\(config=int\): must be a dict or the path of a JSON file"),
    ({"config": "/no/file"}, "No such file or directory.*; give a JSON file"),
    ({"config": {"dtype": "fp32"}, "dtype": "bf16"}, "contradicts its config, which has dtype 'fp32'"),
]


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(_refuses, world_size=1)


def _refuses(rank: int) -> None:
    model = torch.nn.Linear(2, 2)
    for options, text in REFUSED:
        with pytest.raises(ConfigError, match=text):
            dslaunch.init_inference(model, **options)
    for given in (None, "gpt2"):
        with pytest.raises(ConfigError, match=r"must be a torch.nn.Module; of a pipeline give the model"):
            dslaunch.init_inference(given)  # type: ignore[arg-type]


GPU = ModelFacts(
    is_on_gpu=True, attention="eager", has_fused=True, generates=True, is_divided=False, is_streamed=False
)
ALL = InferenceOptions(kernels=True, graphs=True, compiles=True)


def test_options_of_kernels_come_to_what_torch_and_transformers_have() -> None:
    done = plan_speedups(ALL, GPU)
    assert (done.attention, done.static_cache, done.compiles) == ("sdpa", True, False)
    bert = GPU._replace(generates=False, attention="sdpa")
    done = plan_speedups(ALL, bert)
    assert (done.attention, done.static_cache, done.compiles) == (None, False, True)
    for facts, why in (
        (GPU._replace(is_on_gpu=False), "there is no GPU"),
        (GPU._replace(is_divided=True), "layers are divided over ranks"),
        (GPU._replace(is_streamed=True), "weights have other addresses at each use"),
    ):
        done = plan_speedups(ALL, facts)
        assert not done.static_cache
        assert done.notes[1] == f"enable_cuda_graph: no effect, {why}"
    assert plan_speedups(InferenceOptions(), GPU).notes == ()


def test_options_without_effect_are_told_in_one_line(ranks: Ranks) -> None:
    ranks(_is_told, world_size=1)


def _is_told(rank: int) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    try:
        dslaunch.init_inference(
            make_model("Llama"),
            replace_with_kernel_inject=True,
            enable_cuda_graph=True,
            return_tuple=False,
            training_mp_size=2,
            zero={"stage": 2},
        )
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)
    assert told == [
        "init_inference: replace_with_kernel_inject: attention by sdpa; enable_cuda_graph: no effect, there "
        "is no GPU; return_tuple: no effect, it is for DeepSpeed's kernels; training_mp_size: no effect, a "
        "checkpoint is read by any number of ranks; zero: no effect, its stage shards what only training has"
    ]
