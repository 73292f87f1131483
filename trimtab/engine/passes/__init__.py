"""How does a chunk of tokens go through the modules with fixed shapes?"""
