"""The protocol between launcher, agents and relays: frames, and many streams over one.

It travels; it may import the standard library only.
"""
