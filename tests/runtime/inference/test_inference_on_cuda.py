"""Engines for inference on the fake device: its NCCL is late, and freed memory is NaN."""

from __future__ import annotations

from typing import Any

import torch

import dslaunch
from tests.runtime.answering_models import make_inputs, make_model
from tests.runtime.ranks import Ranks


def _answers(rank: int, options: dict[str, Any]) -> None:
    for name in ("Llama", "GPT2"):
        plain = make_model(name).cpu().eval()
        inputs = {key: value.cpu() for key, value in make_inputs(name, 0).items()}
        wanted = plain.generate(**inputs, max_new_tokens=5, do_sample=False)
        engine = dslaunch.init_inference(make_model(name), **options)
        assert engine.device.type == "cuda"
        assert engine._speedups.static_cache is ("enable_cuda_graph" in options)
        engine.profile_model_time()
        on_gpu = {key: value.cuda() for key, value in inputs.items()}
        made = engine.generate(**on_gpu, max_new_tokens=5, do_sample=False, disable_compile=True)
        assert made.cpu().tolist() == wanted.tolist(), name
        assert len(engine.model_times()) == wanted.shape[1] - inputs["input_ids"].shape[1]
        logits = engine(**on_gpu).logits
        torch.testing.assert_close(logits.cpu(), plain(**inputs).logits, atol=1e-4, rtol=1e-3)
        engine.destroy()


def test_tokens_on_gpus_are_those_of_one_process(cuda_ranks: Ranks) -> None:
    """The last way has a static cache; what transformers compiles for it needs a real GPU."""
    for options in ({"offload": "cpu"}, {"tp_size": 2}, {"enable_cuda_graph": True}):
        cuda_ranks(_answers, options, world_size=2)
