"""Tests of dslaunch. They mirror the folders of the program: `launcher/inputs/hostfile.py` ->
`tests/launcher/inputs/test_hostfile.py`.
"""
