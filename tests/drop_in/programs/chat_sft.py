"""Step 1, supervised fine-tuning."""

from __future__ import annotations

import torch
from chat_parts import (
    convert_linear_layer_to_lora,
    create_hf_model,
    get_train_ds_config,
    parse_args,
    save_hf_format,
    save_zero_three_model,
    start_engine,
    tokens_at,
)
from deepspeed import get_accelerator


def main() -> None:
    args = parse_args()
    device = torch.device(get_accelerator().device_name())
    model = create_hf_model(args.folder, get_train_ds_config(args))
    if args.lora_dim:
        model = convert_linear_layer_to_lora(model, "decoder.layers.", args.lora_dim)
        model.enable_input_require_grads()
    model = start_engine(args, model, lr=2e-2)
    model.gradient_checkpointing_enable()
    losses = []
    for step in range(8):
        tokens = tokens_at(step).to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        model.backward(loss)
        model.step()
        losses.append(loss.item())
    model.tput_timer.update_epoch_count()
    model.eval()
    with torch.no_grad():
        losses.append(model(input_ids=tokens_at(0).to(device), labels=tokens_at(0).to(device)).loss.item())
    if args.global_rank == 0:
        save_hf_format(model, args.folder / "sft.bin")
    save_zero_three_model(model, args.global_rank, args.folder / "sft.bin", args.zero_stage)
    print("RESULT", args.global_rank, *losses, flush=True)


if __name__ == "__main__":
    main()
