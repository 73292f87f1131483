"""Which release introduced a failure?"""
