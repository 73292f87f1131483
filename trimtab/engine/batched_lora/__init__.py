"""How does a kernel find the adapter of each row?"""
