"""Measure the memory that each rank needs to load a pretrained model at ZeRO-3."""

import json
import re
import threading
import time
from pathlib import Path

import deepspeed
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

KB_PER_MB = 1024


def own_mb() -> float:
    """Return the memory of this process that is no file's."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / KB_PER_MB


def peak_while(action) -> float:
    """Return by how many MB this process grows at most while the action runs."""
    before, sizes, is_over = own_mb(), [own_mb()], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            sizes.append(own_mb())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    is_over.set()
    watcher.join()
    return max(sizes) - before


deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
if rank == 0:
    made = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **shape))
    made.save_pretrained("pretrained")
    del made
deepspeed.comm.barrier()
weights_mb = Path("pretrained/model.safetensors").stat().st_size / KB_PER_MB**2
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
told = HfDeepSpeedConfig(config)
grown = peak_while(lambda: LlamaForCausalLM.from_pretrained("pretrained"))
print(json.dumps({"rank": rank, "grown": grown, "allowed": weights_mb}), flush=True)
