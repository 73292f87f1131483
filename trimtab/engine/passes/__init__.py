"""How do the modules compute a chunk of tokens with fixed shapes?"""
