"""`deepspeed.ops.lion.cpu_lion` of dslaunch: see dslaunch/drop_in/names."""

from dslaunch.drop_in.serve import serve

__getattr__, __dir__ = serve("deepspeed.ops.lion.cpu_lion")
