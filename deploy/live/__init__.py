"""``./deploy/up``: the whole chain on this machine, private, with a live board, an account, and the three traces.

The script ``deploy/up`` sets the machine up and runs ``python -m deploy.live``.
"""
