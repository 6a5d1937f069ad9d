"""Log events of the APNs session."""

import logging

from common.logs import define

APNS_CONNECTED = define("apns_connected", logging.INFO, "A connection to APNs stands.")
APNS_CONNECTION_ENDED = define(
    "apns_connection_ended",
    logging.INFO,
    "A connection to APNs ended; the line says why and what it carried.",
)
APNS_UNREACHABLE = define(
    "apns_unreachable", logging.WARNING, "No connection to APNs can be made; rows wait, no attempt is burnt."
)
APNS_REACHED = define("apns_reached", logging.INFO, "Connections to APNs can be made again.")
APNS_TOKEN_REFUSED = define(
    "apns_token_refused", logging.WARNING, "APNs refused the provider token; the line says what was done."
)
APNS_KEY_FILE_UNUSABLE = define(
    "apns_key_file_unusable",
    logging.ERROR,
    "A key file changed and cannot be used; the key before stays in use.",
)
APNS_KEY_FILE_RELOADED = define(
    "apns_key_file_reloaded", logging.INFO, "A key file holds a new key: new token, new connections."
)
