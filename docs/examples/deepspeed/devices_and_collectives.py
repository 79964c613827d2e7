"""One script for every kind of device: ask the accelerator, and talk through deepspeed.comm.

    dslaunch --num_gpus 2 docs/examples/deepspeed/devices_and_collectives.py

It also runs as one process or with any number of them.
"""

import argparse

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed import get_accelerator
from deepspeed.utils import log_dist


def show_accelerator(local_rank):
    accelerator = get_accelerator()
    accelerator.set_device(local_rank)
    accelerator.manual_seed_all(1234)
    print(f"device {accelerator.device_name()} backend {accelerator.communication_backend_name()}")
    print(f"current device {accelerator.current_device_name()} available {accelerator.is_available()}")
    print(f"bf16 {accelerator.is_bf16_supported()} float32 {torch.float32 in accelerator.supported_dtypes()}")
    if accelerator.is_synchronized_device():  # as the CPU: it has no streams
        ones = torch.ones(256, device=accelerator.current_device_name())
    else:
        with accelerator.stream(accelerator.Stream()):
            ones = torch.ones(256, device=accelerator.current_device_name())
    accelerator.synchronize()
    pinned = accelerator.pin_memory(torch.arange(4.0))
    accelerator.range_push("sum")
    print(f"sum {int(ones.sum())} and {int(pinned.sum())}, on accelerator {accelerator.on_accelerator(ones)}")
    accelerator.range_pop()
    accelerator.empty_cache()
    print(f"memory in use is known: {accelerator.memory_allocated() >= 0}", flush=True)


def show_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    device = get_accelerator().current_device_name()
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    best = torch.tensor([rank], device=device)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)

    word = torch.full((2,), 7.0 if rank == 0 else 0.0, device=device)
    dist.broadcast(word, src=0)

    parts = [torch.empty(1, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([10.0 * rank], device=device))
    flat = torch.empty(2 * size, device=device)
    dist.all_gather_into_tensor(flat, torch.tensor([rank, rank + 0.5], device=device))

    mine = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(mine, torch.arange(float(size), device=device))

    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    pair = dist.new_group(ranks=list(range(size)))
    dist.barrier(group=pair)
    if rank == 0:
        print(f"all_reduce {int(total)} max {int(best)} broadcast {word.tolist()}")
        print(f"all_gather {[int(one) for one in parts]} into {flat.tolist()}")
        print(
            f"reduce_scatter {int(mine)} objects {names} group of {dist.get_world_size(group=pair)}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description="Devices and collectives.")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    deepspeed.init_distributed()  # a second time does nothing
    if args.local_rank == 0:
        show_accelerator(args.local_rank)
    show_collectives()
    log_dist(f"done on {dist.get_world_size()} ranks", ranks=[0])


if __name__ == "__main__":
    main()
