"""Text of the user turned into data: hostfile, host ranges, environment file, profile.

It may import wire, errors and wording.
"""
