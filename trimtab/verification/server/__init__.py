"""Does a server apply its adapter?"""
