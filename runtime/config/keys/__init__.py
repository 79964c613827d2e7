"""Keys of a ds_config that are accepted without effect, or refused: a table for each part of it.

The keys that are used are the fields of the models in this folder's parent.
"""
