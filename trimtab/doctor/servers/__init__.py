"""Known adapter bugs in other servers, one file per server, and which of them apply to a given server."""
