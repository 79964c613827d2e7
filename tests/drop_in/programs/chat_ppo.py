"""Step 3, reinforcement learning: an actor and a critic that train, a reference and a reward model that do
not, a moving average.
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
    save_zero_three_model,
    start_engine,
    tokens_at,
    z3_params_to_fetch,
)
from chat_reward import RewardModel
from deepspeed import get_accelerator
from torch import nn


def log_probs(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = engine(tokens, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def moving_average(model: Any, model_ema: Any, beta: float, zero_stage: int) -> None:
    with torch.no_grad():
        for param, param_ema in zip(model.parameters(), model_ema.parameters(), strict=True):
            to_fetch = z3_params_to_fetch([param, param_ema]) if zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(to_fetch, enabled=bool(to_fetch)):
                param_ema.data.copy_(torch.lerp(param.data, param_ema.data, beta))


def main() -> None:
    args = parse_args()
    device = torch.device(get_accelerator().device_name())
    train_config, eval_config = get_train_ds_config(args), get_eval_ds_config(args)
    actor = start_engine(args, create_hf_model(args.folder, train_config), lr=1e-2)
    ref, *_ = deepspeed.initialize(model=create_hf_model(args.folder, eval_config), config=eval_config)
    critic = start_engine(args, RewardModel(create_hf_model(args.folder, train_config).model), lr=1e-2)
    reward, *_ = deepspeed.initialize(
        model=RewardModel(create_hf_model(args.folder, eval_config).model), config=eval_config
    )
    ema = None
    if args.enable_ema:
        ema, *_ = deepspeed.initialize(model=create_hf_model(args.folder, eval_config), config=eval_config)

    losses = []
    for step in range(3):
        for one in (actor, critic, ref, reward):
            one.eval()
        prompts = tokens_at(step)[:, :4].to(device)
        with torch.no_grad():
            tokens = actor.module.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_length=9,
                min_length=9,
                do_sample=False,
                pad_token_id=1,
                synced_gpus=args.zero_stage == 3,
            )
            old = log_probs(actor, tokens)
            advantages = (
                reward.forward_value(tokens).float()[:, 1:]
                - 0.1 * (old - log_probs(ref, tokens))
                - critic.forward_value(tokens).float()[:, 1:]
            )
        actor.train()
        critic.train()
        ratio = torch.exp(log_probs(actor, tokens) - old)
        actor_loss = -torch.min(advantages * ratio, advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
        actor.backward(actor_loss)
        actor.step()
        critic_loss = nn.functional.mse_loss(critic.forward_value(tokens).float()[:, 1:], advantages)
        critic.backward(critic_loss)
        critic.step()
        losses += [actor_loss.item(), critic_loss.item()]
        if ema is not None:
            moving_average(actor, ema, beta=0.9, zero_stage=args.zero_stage)
    save_zero_three_model(actor, args.global_rank, args.folder / "actor.bin", args.zero_stage)
    print("RESULT", args.global_rank, *losses, flush=True)


if __name__ == "__main__":
    main()
