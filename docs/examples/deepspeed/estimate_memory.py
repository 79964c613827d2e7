"""Ask how much memory a model would take at ZeRO stages 2 and 3, on machines that are not there.

    dslaunch --num_gpus 2 docs/examples/deepspeed/estimate_memory.py

It also runs as one process: `python docs/examples/deepspeed/estimate_memory.py`,
with the package on PYTHONPATH.
"""

import argparse

from deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from torch import nn


def make_model():
    """4 layers of 2,099,200 and an embedding of 8,192,000 parameters."""
    layers = [nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(16000, 512), *layers)


def main():
    parser = argparse.ArgumentParser(description="Estimate the memory of a model.")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    if args.local_rank > 0:
        return
    model = make_model()
    print(f"parameters {sum(param.numel() for param in model.parameters())}")
    estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=2)
    # A model of 7 billion parameters, whose largest layer has 250 millions.
    estimate_zero2_model_states_mem_needs_all_cold(total_params=7e9, num_gpus_per_node=8, num_nodes=1)
    estimate_zero3_model_states_mem_needs_all_cold(
        total_params=7e9, largest_layer_params=250e6, num_gpus_per_node=8, num_nodes=4
    )


if __name__ == "__main__":
    main()
