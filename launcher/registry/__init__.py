"""The jobs of this user on this machine: what is known of each, its output, and how it is reached.

It may import output and what stands below it, and neither its neighbours fleet, external and rendezvous nor
the controller.
"""
