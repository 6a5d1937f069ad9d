"""How the time of a claim grows: with the backlog, with history, and with a snapshot that somebody holds."""
