"""How are the figures and tables of a report drawn?"""
