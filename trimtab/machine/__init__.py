"""This machine, and what is cached about it: memory, GPUs, rates, installed packages, files. Imports no torch."""
