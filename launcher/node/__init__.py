"""What runs on other machines: agent, workers, relay, shim.

It travels there as a whole, so it may import wire and the standard library only.
"""
