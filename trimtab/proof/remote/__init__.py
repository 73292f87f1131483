"""Whether the adapter that a server loaded is alive: the server's answers beside our own, and beside known faults."""
