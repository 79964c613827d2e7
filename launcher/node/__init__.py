"""The code that runs on other machines: agent, workers, relay, shim.

It travels there as a whole, so it may import wire and the standard library only.

[Note: Imports at need]
Every host of a job pays for each module: `typing`, `enum`, `json` and `socket` take 3 to 12 ms of its start,
`subprocess`, `shutil`, `traceback` and `ctypes` 2 to 3 ms. So `TYPE_CHECKING` is a plain False, modules of C
stand in for slow ones, and a module that only some jobs, hosts or failures need is imported in the function
that needs it.
"""
