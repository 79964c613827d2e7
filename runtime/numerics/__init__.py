"""The same steps of a program twice, as configured and by torch alone, and what differs: `dslaunch numerics`.

Recordings are written by the ranks of both runs, one file for each rank and step, and compared afterwards.
docs/design/numerics.md says what the plain run shares with the engine under test.
"""
