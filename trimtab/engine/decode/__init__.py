"""How is one token of every row computed?"""
