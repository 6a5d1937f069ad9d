"""Drain's speed beside stock aioapns' and Node's: see ``python -m bench.drain --help``."""
