"""Which files does a merge write them to?"""
