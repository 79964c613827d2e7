"""What a person writes, from text to data: hostfile, host ranges, environment file, profile.

It may import wire, errors and wording.
"""
