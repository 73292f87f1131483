"""Which known failure is in a pasted text, and whose is it?"""
