"""How are two routes to the same answer run, each in a process?"""
