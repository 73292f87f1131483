"""Which values and errors do all parts of the server share?"""
