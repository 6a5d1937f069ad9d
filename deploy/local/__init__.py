"""Private servers for tests and the demo: own folders, own ports, own names; nothing that runs is used or disturbed.

Every process is started by this package, ended by its own id, and dies with the process that started it.
"""
