"""How do requests become jobs, and answers become responses?"""
