"""One stream of a model's weights, whole tensor after whole tensor, for all that want them: files, servers
that generate, trainers.

A pass is planned before a byte moves: what is gathered together, what is converted together, and the names,
shapes and dtypes that come out. All ranks go along the same plan.
"""
