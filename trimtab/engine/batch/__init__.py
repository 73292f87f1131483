"""How are rows decoded together, and how are tokens sampled?"""
