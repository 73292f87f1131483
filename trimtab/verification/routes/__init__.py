"""How are two ways to the same answer run, each in a process?"""
