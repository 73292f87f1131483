"""Which values does a merge change, and to what?"""
