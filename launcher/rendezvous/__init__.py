"""The mode without SSH, in which nodes find each other (--no_ssh).

It may import controller and what stands below it.
"""
