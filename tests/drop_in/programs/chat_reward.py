"""Step 2, a reward model: of each pair, the first answer is the better one."""

from __future__ import annotations

import torch
from chat_parts import (
    create_hf_model,
    get_train_ds_config,
    parse_args,
    save_hf_format,
    save_zero_three_model,
    start_engine,
    tokens_at,
)
from deepspeed import get_accelerator
from torch import nn


class RewardModel(nn.Module):
    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.config = base_model.config
        torch.manual_seed(5)  # with zero.Init the base model has drawn other numbers
        self.v_head = nn.Linear(self.config.word_embed_proj_dim, 1, bias=False)
        self.rwtransformer = base_model

    def gradient_checkpointing_enable(self) -> None:
        self.rwtransformer.gradient_checkpointing_enable()

    def values(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.rwtransformer(input_ids=input_ids, use_cache=False)[0]
        return self.v_head(hidden).squeeze(-1)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        chosen, rejected = self.values(input_ids).chunk(2)
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        return {"loss": loss, "chosen_mean_scores": chosen[:, -1], "rejected_mean_scores": rejected[:, -1]}

    def forward_value(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.values(input_ids)


def main() -> None:
    args = parse_args()
    device = torch.device(get_accelerator().device_name())
    model = create_hf_model(args.folder, get_train_ds_config(args)).model
    engine = start_engine(args, RewardModel(model), lr=1e-2)
    engine.gradient_checkpointing_enable()
    losses = []
    for step in range(8):
        tokens = tokens_at(step).to(device)
        outputs = engine(input_ids=torch.cat([tokens, tokens.flip(1)]))
        engine.backward(outputs["loss"])
        engine.step()
        losses.append(outputs["loss"].item())
    engine.eval()
    with torch.no_grad():
        values = engine.forward_value(torch.cat([tokens, tokens.flip(1)]))
    if args.global_rank == 0:
        save_hf_format(engine, args.folder / "reward.bin")
    save_zero_three_model(engine, args.global_rank, args.folder / "reward.bin", args.zero_stage)
    print("RESULT", args.global_rank, *losses, values.float().mean().item(), flush=True)


if __name__ == "__main__":
    main()
