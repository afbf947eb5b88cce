"""Fuzzing of every parser that reads bytes from outside: seeds in `corpus/`, mutation and coverage in plain Python.

A few thousand runs of each target are part of the tests. For longer: `python -m tests.fuzz --seconds 3600 head`. A target must have been
seen to fail: with its parser broken, or with what it holds broken.
"""
