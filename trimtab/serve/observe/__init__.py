"""Which metrics and traces does the server export?"""
