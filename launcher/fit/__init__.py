"""Does a job fit on its hosts: each kind of rank is rehearsed here, and its bytes are held against memory.

The rehearsal is the runtime's `python -m dslaunch.runtime.plan`, in processes of their own.
"""
