"""Which numbers and traces does the server give?"""
