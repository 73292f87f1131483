"""Which kernels are there, are they right on this card, and how are they configured?"""
