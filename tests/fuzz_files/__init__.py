"""Mutated files by the thousand, in this process: adapters, plan files, configs, headers, indexes, tokenizers, media."""
