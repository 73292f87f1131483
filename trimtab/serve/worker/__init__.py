"""What does the process do that owns a model?"""
