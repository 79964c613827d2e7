"""Public reports of faults, as small programs: what is right, what dslaunch gives, what DeepSpeed gives here.

reports.py is the table of them, programs/ has the programs, which a user could have written, run.py runs one
with either package, and judge.py says whether what came out is right. page.py writes
docs/reference/faults-of-the-field.md of results.json, which `make field` writes anew.
"""
