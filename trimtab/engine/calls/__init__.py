"""Which ways are there to ask a loaded model?"""
