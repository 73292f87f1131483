"""How fast a model answers here, beside the stock stack and beside what the machine's memory allows."""
