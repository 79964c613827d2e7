"""`dslaunch top`: a job on a screen that changes.

A frame is made of the state of the run as data (frame.py and what it imports); screen.py shows frames, and is
the only file that imports textual. It may import registry and what stands below it.
"""
