"""Relay's speed beside the broker's own: see ``python -m bench.relay --help``."""
