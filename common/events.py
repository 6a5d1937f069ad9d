"""Log events of both daemons."""

import logging

from common.logs import define

STARTED = define("started", logging.INFO, "The daemon runs: settings read, schema fits, probes answer.")
STOPPING = define("stopping", logging.INFO, "A signal came: no new work is claimed from here on.")
STOPPED = define("stopped", logging.INFO, "The last line: what was done, and what was left for others.")
ABORTING = define("aborting", logging.WARNING, "A second signal came: give back and leave at once.")
STOP_OVERDUE = define(
    "stop_overdue", logging.ERROR, "The shutdown deadline passed; leases or rollback finish the rest."
)
CONFIGURATION_REFUSED = define(
    "configuration_refused", logging.ERROR, "A setting or a combination breaks a promise."
)
UNKNOWN_VARIABLE = define(
    "unknown_variable", logging.WARNING, "A variable with our prefix means nothing: misspelt?"
)
SCHEMA_REFUSED = define(
    "schema_refused", logging.ERROR, "The schema is missing, too old or too new; the line says what mends it."
)
WAITING_FOR_DATABASE = define(
    "waiting_for_database", logging.WARNING, "The database can not be used yet; not ready, trying on."
)
DATABASE_REACHED = define("database_reached", logging.INFO, "The database answers after it did not.")
INNER_TASK_DIED = define(
    "inner_task_died", logging.CRITICAL, "A task ended that must not; the process exits with 1."
)
STALLED = define(
    "stalled", logging.CRITICAL, "No step succeeded for too long while the database answers; exit 1."
)
OBSERVATION_FAILED = define(
    "observation_failed", logging.WARNING, "The queue's lag could not be read; its gauges are gone."
)
OBSERVATION_RECOVERED = define("observation_recovered", logging.INFO, "The queue's lag is read again.")
PRUNE_FAILED = define(
    "prune_failed", logging.WARNING, "Old rows could not be pruned; tried again in the next round."
)
PRUNE_RECOVERED = define("prune_recovered", logging.INFO, "Pruning works again.")
PRUNED = define("pruned", logging.INFO, "Rows past their retention were deleted.")
