"""Do two routes give the same answers?"""
