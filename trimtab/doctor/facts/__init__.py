"""What is known of a bug?"""
