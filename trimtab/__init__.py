"""trimtab."""
