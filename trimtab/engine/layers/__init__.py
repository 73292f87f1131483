"""Which modules replace Linear and Embedding?"""
