"""Answers of a small model, with the calls of a text generation test: a model of its own or on the meta
device, in one process or divided over all, in several dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import see_memory_usage
from transformers import AutoConfig, AutoModelForCausalLM


class Pipeline:
    """Model and prompts, as a pipeline of transformers has them."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        self.device = torch.device(get_accelerator().device_name(args.local_rank))
        if args.use_meta_tensor:
            files = [file.name for file in Path(args.model).glob("*.safetensors")]
            self.checkpoints_json = Path(args.folder) / f"checkpoints{args.local_rank}.json"
            self.checkpoints_json.write_text(
                json.dumps({"type": "DS_MODEL", "checkpoints": files, "version": 1.0})
            )
            with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
                self.model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model)
        self.model.eval()
        if dtype == torch.float16:
            self.model.half()

    def __call__(self, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
        self.model.to(self.device)
        made: torch.Tensor = self.model.generate(input_ids=prompts.to(self.device), **options)
        return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--use_kernel", action="store_true")
    parser.add_argument("--use_meta_tensor", action="store_true")
    parser.add_argument("--test_hybrid_engine", action="store_true")
    parser.add_argument("--zero", choices=["cpu", "nvme"])
    parser.add_argument("--local_rank", type=int, default=int(os.getenv("LOCAL_RANK", "0")))
    parser.add_argument("--world_size", type=int, default=int(os.getenv("WORLD_SIZE", "1")))
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    see_memory_usage("before init", True)
    pipe = Pipeline(args, dtype)
    from_files: dict[str, Any] = {}
    if args.use_meta_tensor:
        from_files = {"base_dir": args.model, "checkpoint": str(pipe.checkpoints_json)}
    if args.test_hybrid_engine:
        ds_config = {"train_batch_size": args.world_size, "hybrid_engine": {"enabled": True}}
        pipe.model, *_ = deepspeed.initialize(model=pipe.model, config=ds_config)
        pipe.model.eval()
    elif args.zero:  # ZeRO-Inference
        place = {"device": args.zero} | ({"nvme_path": args.folder} if args.zero == "nvme" else {})
        ds_config = {
            "train_batch_size": args.world_size,
            "zero_optimization": {"stage": 3, "offload_param": place},
        }
        engine = deepspeed.initialize(model=pipe.model, config_params=ds_config)[0]
        engine.module.eval()
        pipe.model = engine.module
    else:
        pipe.model = deepspeed.init_inference(
            pipe.model,
            dtype=dtype,
            mp_size=args.world_size,
            replace_with_kernel_inject=args.use_kernel,
            max_tokens=32,
            save_mp_checkpoint_path=None,
            **from_files,
        )
        assert isinstance(pipe.model, deepspeed.InferenceEngine)
        pipe.model.profile_model_time(use_cuda_events=False)
    see_memory_usage("after init_inference", True)
    times = []
    for _ in range(2):
        get_accelerator().synchronize()
        start = time.time()
        made = pipe(torch.tensor([[3, 4, 5], [6, 7, 8]]), max_new_tokens=5, do_sample=False)
        get_accelerator().synchronize()
        times.append(time.time() - start)
    if isinstance(pipe.model, deepspeed.InferenceEngine):
        model_times = pipe.model.model_times()
        assert len(model_times) == 2 * 5, model_times
        assert sum(model_times) <= sum(times) * 1e3
        assert pipe.model.config is pipe.model.module.config
    print("RESULT", args.local_rank, *made.flatten().tolist(), flush=True)


if __name__ == "__main__":
    main()
