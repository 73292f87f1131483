"""Does the installed stack have a known bug?"""
