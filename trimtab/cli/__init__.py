"""How is a command line parsed?"""
