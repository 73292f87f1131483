"""What is known of a bug, and of the runs that show it?"""
