"""What is this machine, and what did earlier processes measure on it?"""
