"""The one package of drain that knows APNs, HTTP/2 and aioapns."""
