"""Benchmarks of the gateway against real peers, repeatable by a stranger with one command: `python -m bench`."""
