"""Options of other launchers that are not here, and what to write instead."""

from __future__ import annotations

# Options of DeepSpeed's launcher, then those of torchrun.
ABSENT = {
    **dict.fromkeys(
        ("--deepspeed", "--deepspeed_config"),
        "it is the program's: write it behind the script, as in dslaunch train.py --deepspeed "
        "--deepspeed_config FILE",
    ),
    "--nproc_per_node": "write --num_gpus=N, or slots=N in the hostfile",
    **dict.fromkeys(
        ("-n", "-np", "--np"), "write --num_gpus=N for N processes on each host, or slots=N in the hostfile"
    ),
    "-N": "write --num_nodes=N for the first N hosts of the hostfile",
    "--nnodes": "write --num_nodes=N; MIN:MAX is allowed",
    **dict.fromkeys(
        ("--rdzv_backend", "--rdzv_endpoint", "--rdzv_id", "--rdzv_conf", "--standalone"),
        "there is no rendezvous to describe; leave it out (with --no_ssh: --master_addr and --job_id)",
    ),
}
