"""`deepspeed.launcher.runner` of dslaunch: see dslaunch/drop_in/names."""

from dslaunch.drop_in.serve import serve

__getattr__, __dir__ = serve("deepspeed.launcher.runner")

if __name__ == "__main__":
    __getattr__("main")()
