"""Which calls does a loaded model answer?"""
