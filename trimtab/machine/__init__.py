"""What is this machine, and what did earlier processes learn about it?"""
