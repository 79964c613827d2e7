"""Experts: each rank of an expert-parallel group holds some of a layer's experts, and tokens are sent to
them.

gate.py          which experts a token goes to
dispatch.py      the way of the tokens there and back
layer.py         DeepSpeed's layer MoE
hf.py            experts of Hugging Face models
param_groups.py  parameters of experts apart from the others
placed.py        one model's experts over the ranks: what an engine asks of it
"""
