"""What runs: the machine, formats, tiers, loading, adapters, questions and answers."""
