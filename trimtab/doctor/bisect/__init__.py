"""Which release broke it?"""
