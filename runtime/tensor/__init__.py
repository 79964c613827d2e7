"""Tensor parallelism: parameters of which each rank along the axis tp holds another part.

lower.py    DTensors, as torch's own plans make them, become plain parameters
styles.py   how a module computes with parts of its parameters
plan.py     which module gets which style: a ds_config's rules, or a Hugging Face model's own plan
own_layers.py  layers that a program has divided itself, which are refused
divide.py   all of that for one model; divided_model.py has what an engine asks of it then
"""
