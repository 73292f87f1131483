"""How does a plan become a model?"""
