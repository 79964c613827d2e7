"""The program dslaunch: its commands and their options.

The only folder that knows click commands; it may import all the others.
"""
