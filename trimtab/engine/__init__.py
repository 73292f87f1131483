"""Which object is a loaded model, the owner of the memory?"""
