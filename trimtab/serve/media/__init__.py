"""What are the bytes of a request's media?"""
