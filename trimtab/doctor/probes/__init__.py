"""Is a known bug here?"""
