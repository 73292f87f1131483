"""The server: many clients, each with its own adapter, answered by one model in a separate process."""
