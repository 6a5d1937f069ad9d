"""Benchmarks: each measures its own claim of the README and prints the numbers it rests on."""
