"""Tests of the sandbox host: one folder per kind, what they share in `support`."""
