"""How do copies of the server run on Ray?"""
