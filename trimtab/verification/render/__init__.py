"""How is a verification reported to people?"""
