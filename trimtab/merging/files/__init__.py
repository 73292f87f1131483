"""Which files does a merge write?"""
