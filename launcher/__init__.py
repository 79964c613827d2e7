"""From a command line to running workers on many hosts, and back to one verdict. No torch.

[Note: Imports at need]
A module that only some commands, options or failures need is imported in the function that needs it, so that
`--help` and a local job do without it. Modules take: difflib, random and textwrap 1 ms, traceback 2 ms,
subprocess 5 ms, PyYAML 15 ms, paramiko 50 ms, the screen of `dslaunch top` 0.3 s.
"""
