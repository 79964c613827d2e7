"""What launcher, agents and relays say to each other: frames, and many streams over one.

It travels; it may import the standard library only.
"""
