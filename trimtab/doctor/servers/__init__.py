"""What is known about adapters in other servers, one file a server, and which of it applies to a server that is asked."""
