"""Facts that both halves must agree on: axes, names of variables, marks, the form of tables.

The launcher, what travels to a node, and the runtime import it; it imports the standard library only.
"""
