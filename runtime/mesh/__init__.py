"""Which ranks share which parameters: the axes of a job, and the domains of a model.

It may import comm and what stands below it.
"""
