"""Log events of relay."""

import logging

from common.logs import define

BATCH_FAILED = define(
    "batch_failed", logging.WARNING, "A batch did not commit: nothing of it is marked, all of it comes again."
)
BATCH_RECOVERED = define("batch_recovered", logging.INFO, "Batches commit again.")
ROW_FAILED = define(
    "row_failed", logging.WARNING, "The broker refused a row by the row's own fault; it is tried again later."
)
ROW_QUARANTINED = define(
    "row_quarantined", logging.ERROR, "A row is given up until someone releases it: relay quarantine list."
)
ROWS_NACKED = define(
    "rows_nacked", logging.WARNING, "A queue refused rows (full, rejecting); no attempt is burnt."
)
ROWS_LEFT = define(
    "rows_left", logging.WARNING, "The broker did not confirm rows of a batch; they come again untouched."
)
WAKEUP_LOST = define(
    "wakeup_lost", logging.WARNING, "The LISTEN connection is gone; the tick carries on alone."
)
WAKEUP_LISTENING = define(
    "wakeup_listening", logging.INFO, "LISTEN works (again); one look at the outbox follows."
)
