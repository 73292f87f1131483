"""How is the whole server run?"""
