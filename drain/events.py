"""Log events of drain."""

import logging

from common.logs import define

CLAIM_FAILED = define("claim_failed", logging.WARNING, "Rows could not be claimed; tried again with backoff.")
CLAIM_RECOVERED = define("claim_recovered", logging.INFO, "Rows are claimed again.")
SETTLE_FAILED = define(
    "settle_failed", logging.WARNING, "Outcomes could not be written; they are kept and tried again."
)
SETTLE_RECOVERED = define("settle_recovered", logging.INFO, "Outcomes are written again.")
OUTCOMES_STALE = define(
    "outcomes_stale",
    logging.WARNING,
    "Outcomes matched no row: the lease ran out and another drain has the rows. Counted and dropped.",
)
RECLAIMED = define(
    "reclaimed", logging.WARNING, "Rows were claimed whose earlier lease ran out: a drain died or froze."
)
DELIVERY_FAILED = define(
    "delivery_failed", logging.WARNING, "A delivery ended as failed; the reason is on the row."
)
TOKEN_DEAD = define(
    "token_dead", logging.INFO, "APNs says a device token is dead; an outbox event carries it home."
)
APP_PAUSED = define(
    "app_paused", logging.ERROR, "An app's configuration is wrong: it rests, its rows are given back."
)
APP_STILL_PAUSED = define("app_still_paused", logging.WARNING, "The probe of a paused app failed again.")
APP_RESUMED = define("app_resumed", logging.INFO, "A paused app's probe went through: it runs at full rate.")
LEFT_BEHIND = define(
    "left_behind", logging.WARNING, "Rows were not settled at the end; their lease brings them back."
)
