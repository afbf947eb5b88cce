"""The benchmarks work, and what they must not believe they do not believe. No number is judged here."""
