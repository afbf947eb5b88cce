"""Fuzzing of every parser that reads a sandbox's bytes: seeds in `corpus/`, mutation and coverage in plain Python.

A few thousand runs of each target are part of the tests. For longer: `python -m tests.fuzz --seconds 3600 head`.
"""
