"""Step 2 without a reward model: of each pair the first answer is the better one, beside a second engine with
the model as it was.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from chat_parts import (
    create_hf_model,
    get_eval_ds_config,
    get_train_ds_config,
    parse_args,
    save_hf_format,
    save_zero_three_model,
    start_engine,
    tokens_at,
)
from deepspeed import get_accelerator

BETA = 0.5


def log_probability(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(-1).sum(1)


def main() -> None:
    args = parse_args()
    device = torch.device(get_accelerator().device_name())
    model = create_hf_model(args.folder, get_train_ds_config(args))
    ref_config = get_eval_ds_config(args)
    ref_model = create_hf_model(args.folder, ref_config)
    engine = start_engine(args, model, lr=1e-2)
    engine.gradient_checkpointing_enable()
    ref_engine, *_ = deepspeed.initialize(model=ref_model, config=ref_config)
    ref_engine.eval()
    losses = []
    for step in range(8):
        tokens = tokens_at(step).to(device)
        pairs = torch.cat([tokens, tokens.flip(1)])
        with torch.no_grad():
            before = log_probability(ref_engine, pairs)
        gain, other = (log_probability(engine, pairs) - before).chunk(2)
        loss = -torch.nn.functional.logsigmoid(BETA * (gain - other)).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    if args.global_rank == 0:
        save_hf_format(engine, args.folder / "dpo.bin")
    save_zero_three_model(engine, args.global_rank, args.folder / "dpo.bin", args.zero_stage)
    print("RESULT", args.global_rank, *losses, flush=True)


if __name__ == "__main__":
    main()
