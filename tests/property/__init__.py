"""Properties that hold for every input, found by hypothesis."""
