"""Apple's reasons and the status each of them travels with.

Source: Apple, "Handling notification responses from APNs", tables 8 and 9.
"""

from types import MappingProxyType
from typing import Final

STATUS_OF: Final = MappingProxyType(
    {
        "BadCollapseId": 400,
        "BadDeviceToken": 400,
        "BadExpirationDate": 400,
        "BadMessageId": 400,
        "BadPriority": 400,
        "BadTopic": 400,
        "DeviceTokenNotForTopic": 400,
        "DuplicateHeaders": 400,
        "IdleTimeout": 400,
        "InvalidPushType": 400,
        "MissingDeviceToken": 400,
        "MissingTopic": 400,
        "PayloadEmpty": 400,
        "TopicDisallowed": 400,
        "BadCertificate": 403,
        "BadCertificateEnvironment": 403,
        "BadEnvironmentKeyIdInToken": 403,
        "BadEnvironmentKeyInToken": 403,  # what real servers send, whatever the table says (APNSwift#229)
        "ExpiredProviderToken": 403,
        "Forbidden": 403,
        "InvalidProviderToken": 403,
        "MissingProviderToken": 403,
        "UnrelatedKeyIdInToken": 403,
        "BadPath": 404,
        "MethodNotAllowed": 405,
        "ExpiredToken": 410,
        "Unregistered": 410,
        "PayloadTooLarge": 413,
        "TooManyProviderTokenUpdates": 429,
        "TooManyRequests": 429,
        "InternalServerError": 500,
        "ServiceUnavailable": 503,
        "Shutdown": 503,
    }
)

TIMESTAMPED: Final = frozenset({"ExpiredToken", "Unregistered"})
"""Reasons whose body carries `timestamp`: milliseconds since the epoch."""
