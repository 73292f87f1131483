"""How do copies run on Ray?"""
