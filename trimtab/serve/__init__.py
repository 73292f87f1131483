"""Who asks: many clients, each with its own adapter, answered by one model in a process of its own."""
