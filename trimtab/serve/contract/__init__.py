"""What does every part of the server share?"""
