"""Who may connect, and where does a request go?"""
