"""An APNs simulator: a real TLS HTTP/2 server that answers, limits and fails as Apple's does.

`python -m deploy.simulator` starts it; README.md beside this file is its manual. It keeps no state but what it
was sent, needs no Apple account, and imports nothing of relay, drain or common.
"""
