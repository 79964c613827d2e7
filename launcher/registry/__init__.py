"""The jobs of this user on this machine: their records, their output, and signals to them.

It may import output and what stands below it, but neither its neighbours fleet, external and rendezvous nor
the controller.
"""
