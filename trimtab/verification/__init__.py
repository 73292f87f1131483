"""Do two routes agree?"""
