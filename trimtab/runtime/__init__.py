"""The runtime: the machine, formats, tiers, loading, adapters, prompts and answers."""
