"""Tests of dslaunch. They mirror the folders of the program: `launcher/inputs/hostfile.py` -> `tests/launcher/test_hostfile.py`."""
