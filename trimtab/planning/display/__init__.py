"""How is a plan shown to people?"""
