"""Whether a server applies its adapter: the server's answers against trimtab's, and against known faults."""
