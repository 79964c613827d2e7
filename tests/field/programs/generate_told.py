"""Generate at ZeRO-3 as generate_unequal.py does, with transformers told of the ds_config."""

import json

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

STEPS, END = 2, 2

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
told = HfDeepSpeedConfig(config)  # transformers looks for it as long as it lives
torch.manual_seed(0)
shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, eos_token_id=END, **shape))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


def stop_after(length: int):
    """Let the end of the text come after so many tokens, as an answer's own end would."""

    def next_tokens(batch: int, tokens: torch.Tensor) -> list[int]:
        return [END] if len(tokens) >= length else list(range(3, 32))

    return next_tokens


lengths = []
for _ in range(STEPS):
    rank = engine.global_rank
    prompt = torch.tensor([[5, 6, 7 + rank]])
    answer = engine.module.generate(
        prompt,
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=stop_after(6 + 6 * rank),
    )
    lengths.append(answer.shape[1])
    loss = engine(input_ids=answer, labels=answer).loss
    engine.backward(loss)
    engine.step()
wanted = [3 + 4 + 6 * engine.global_rank] * STEPS  # the prompt, and the answer with its end
print(json.dumps({"rank": engine.global_rank, "lengths": lengths, "wanted": wanted}), flush=True)
