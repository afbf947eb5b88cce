"""Tests of the pure decisions, one file per module."""
