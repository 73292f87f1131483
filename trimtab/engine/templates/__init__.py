"""How is a foreign chat template rendered within bounds?"""
