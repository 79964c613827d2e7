"""`deepspeed` of dslaunch: see dslaunch/drop_in/names."""

from dslaunch.drop_in.serve import serve

__getattr__, __dir__ = serve("deepspeed")
